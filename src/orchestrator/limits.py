"""When a run that cannot learn ends: too many failed episodes, or nothing but groups without signal."""

from __future__ import annotations

from collections import Counter, deque

from contract.errors import EnvironmentFailure
from orchestrator.config import RolloutConfig
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.group import JudgedGroup

_WINDOW = 100


class ErrorRate:
    """Failed episodes among the last 100."""

    def __init__(self, max_error_rate: float) -> None:
        self._max_error_rate = max_error_rate
        self._last: deque[EpisodeFailed | None] = deque(maxlen=_WINDOW)

    def record(self, failure: EpisodeFailed | None) -> None:
        """One more episode has ended.

        Args:
            failure: why it failed; None if it did not.

        Raises:
            EnvironmentFailure: more than `max_error_rate` of 100 episodes have failed, whatever became of
                those of them that are still to come.
        """
        self._last.append(failure)
        if failure is None:
            return
        failures = [one for one in self._last if one is not None]
        if len(failures) > self._max_error_rate * _WINDOW:
            counts = Counter(one.kind for one in failures)
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            raise EnvironmentFailure(
                f"{len(failures)} of the last {len(self._last)} episodes failed ({kinds}), more than "
                f"rollout.max_error_rate = {self._max_error_rate:g} allows. The first error of them was "
                f"{failures[0]}"
            )


class EmptyRule:
    """Groups in a row that had no signal or failed."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._num_no_signal = 0
        self._num_failed = 0
        self._last_rewards: list[float] = []
        self._failure: EpisodeFailed | None = None

    def record(self, group: JudgedGroup) -> None:
        """One more group has been judged.

        Raises:
            EnvironmentFailure: `max_empty_batches` batches' worth of groups in a row gave nothing to train.
        """
        if group.outcome == "signal":
            self._num_no_signal = self._num_failed = 0
            self._last_rewards, self._failure = [], None
            return
        if group.outcome == "no_signal":
            self._num_no_signal += 1
            self._last_rewards = [stat.reward for stat in group.stats]
        else:
            self._num_failed += 1
            self._failure = self._failure or group.failure
        total = self._num_no_signal + self._num_failed
        if total >= self._config.max_empty_batches * self._config.groups_per_batch:
            error = "" if self._failure is None else f" (the first error was {self._failure})"
            rewards = ", ".join(f"{reward:g}" for reward in self._last_rewards[:8])
            example = f" (rewards of the last: {rewards})" if rewards else ""
            raise EnvironmentFailure(
                f"{total} groups in a row gave nothing to learn from: in {self._num_no_signal} all episodes "
                f"had the same reward{example}, {self._num_failed} had fewer than two episodes that did not "
                f"fail{error}. That is rollout.max_empty_batches = {self._config.max_empty_batches} times "
                f"rollout.groups_per_batch = {self._config.groups_per_batch}. Choose tasks that the model "
                f"solves sometimes, or a reward with steps in between; raise rollout.max_empty_batches to "
                f"wait longer"
            )
