"""Evaluation: held-out tasks answered by the policy as it is, never trained on.

Owns which tasks are answered, the metrics, and what of them is printed. An episode that fails is left out of
the metrics and counted. Seeds do not depend on the version, so that two evaluations differ in the policy
alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from contract.errors import EnvironmentFailure
from contract.sections import SamplingConfig
from orchestrator.background import run_all
from orchestrator.config import EvaluationConfig
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.group import Runner, TaskSource, derive_seed, run_episode
from orchestrator.trace import describe_episode, evaluation_path, read_trace, write_trace
from telemetry.console import Console
from telemetry.log import log_to_file, terminal

if TYPE_CHECKING:
    from orchestrator.episode import Episode

logger = logging.getLogger(__name__)

_SEED_DOMAIN = -1
"""Where training has a position, so that no evaluation shares its seeds."""
_MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Answer:
    """One episode of an evaluation, or why there is none."""

    source: str
    task: int
    sample: int
    result: Episode | EpisodeFailed


class Evaluator:
    """Answers the tasks of the evaluation's sources."""

    def __init__(
        self,
        config: EvaluationConfig,
        sources: Sequence[TaskSource],
        runner: Runner,
        *,
        sampling: SamplingConfig,
        seed: int,
        limiter: asyncio.Semaphore,
        rollouts: Path,
        episode_timeout_seconds: float,
    ) -> None:
        """
        Args:
            sources: in the order of `config.sources`.
            sampling: of training, for where `config` has none.
            limiter: a place for each episode that may run at a time.
            rollouts: folder of the traces.
            episode_timeout_seconds: longest episode; then it counts as failed.
        """
        self._config = config
        self._sources = sources
        self._runner = runner
        self._sampling = config.sampling or sampling
        self._seed = seed
        self._limiter = limiter
        self._rollouts = rollouts
        self._timeout_seconds = episode_timeout_seconds
        self.num_episodes_ended = 0
        """Since the start; a run that stands still is told by it."""

    def is_due(self, version: int, max_steps: int) -> bool:
        """Whether this version is evaluated, in a run of `max_steps` updates."""
        if version == max_steps:
            return True
        if version == 0:
            return self._config.at_start
        return self._config.interval is not None and version % self._config.interval == 0

    async def run(self, version: int) -> dict[str, float]:
        """Evaluate, write the trace, print some episodes; returns the metrics.

        Args:
            version: that the policy server serves as this begins.

        Raises:
            EnvironmentFailure: not one episode of a source could be finished.
        """
        answers = await run_all(
            self._answer(source, index, sample, number)
            for number, source in enumerate(self._sources)
            for index in range(min(self._config.num_tasks, source.num_tasks))
            for sample in range(self._config.num_samples)
        )
        rows = [_trace_row(answer, version) for answer in answers]
        await asyncio.to_thread(write_trace, evaluation_path(self._rollouts, version), rows)
        metrics = self._metrics(rows, version, self._sources)
        self._print(answers, metrics, version)
        return metrics

    def recall(self, version: int) -> dict[str, float]:
        """The metrics of an evaluation that an earlier process finished, from its trace; empty if it left
        none. A source without an episode there, or without one that did not fail, has none.

        Raises:
            RunFolderError: the trace cannot be read.
        """
        rows = read_trace(evaluation_path(self._rollouts, version))
        answered = {row["source"] for row in rows if "failed" not in row}
        return self._metrics(rows, version, [one for one in self._sources if one.title in answered])

    def _metrics(
        self, rows: Sequence[Mapping[str, Any]], version: int, sources: Sequence[TaskSource]
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for source in sources:
            own = [row for row in rows if row["source"] == source.title]
            metrics.update(self._source_metrics(source.title, own, version))
        return metrics

    async def _answer(self, source: TaskSource, index: int, sample: int, number: int) -> Answer:
        seed = derive_seed(self._seed, _SEED_DOMAIN, number, index, sample)
        try:
            async with self._limiter:
                task = await source.task(index)
                episode = await run_episode(
                    self._runner,
                    source,
                    task,
                    sampling=self._sampling,
                    seed=seed,
                    timeout_seconds=self._timeout_seconds,
                )
            return Answer(source.title, index, sample, episode)
        except EpisodeFailed as failure:
            return Answer(source.title, index, sample, failure)
        finally:
            self.num_episodes_ended += 1

    def _source_metrics(
        self, title: str, rows: Sequence[Mapping[str, Any]], version: int
    ) -> dict[str, float]:
        failures = [f"{row['failed']}: {row['error']}" for row in rows if "failed" in row]
        rewards: dict[int, list[float]] = {}
        lengths: list[int] = []
        num_truncated = 0
        for row in rows:
            if "failed" not in row:
                rewards.setdefault(row["task"], []).append(row["reward"])
                lengths.append(row["num_tokens"])
                num_truncated += row["truncated"]
        if not rewards:
            raise EnvironmentFailure(
                f"all {len(rows)} episodes of evaluation source {title!r} failed at version {version}; "
                f"the first error was {failures[0]}"
            )
        if failures:
            logger.warning(
                "evaluation of %s at version %d: %d of %d episodes failed and are left out; the first: %s",
                title,
                version,
                len(failures),
                len(rows),
                failures[0],
            )
        valid = [reward for group in rewards.values() for reward in group]
        metrics = {
            f"eval/{title}/mean": math.fsum(valid) / len(valid),
            f"eval/{title}/length": sum(lengths) / len(lengths),
            f"eval/{title}/truncated": num_truncated / len(lengths),
            f"eval/{title}/failed": float(len(failures)),
        }
        for k in _ks(self._config.num_samples):
            chances = [
                pass_at_k(len(group), sum(r >= self._config.pass_threshold for r in group), k)
                for group in rewards.values()
                if len(group) >= k
            ]
            if chances:
                metrics[f"eval/{title}/pass@{k}"] = math.fsum(chances) / len(chances)
        return metrics

    def _print(self, answers: Sequence[Answer], metrics: Mapping[str, float], version: int) -> None:
        means = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        logger.info("evaluation of version %d: %s", version, means)
        shown = [answer for answer in answers if answer.sample == 0][: self._config.num_printed]
        rows = [
            {
                "prompt": _text(_first(answer.result.messages, "user")),
                "answer": _text(_first(reversed(answer.result.messages), "assistant")),
                "reward": f"{answer.result.reward:.3g}",
            }
            for answer in shown
            if not isinstance(answer.result, EpisodeFailed)
        ]
        Console("", live=False).sample(f"episodes of version {version}", rows)
        for row in rows:
            log_to_file(logger, f"version {version}: {row}")


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The chance that one of `k` samples passes, estimated without bias from `num_samples` of which
    `num_passed` did (https://arxiv.org/abs/2107.03374): `1 - C(n - c, k) / C(n, k)`.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def print_comparison(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Print what training has changed, as a table; without `before` there is nothing to compare."""
    names = [name for name in after if name in before and not name.endswith("/failed")]
    if not names:
        return
    table = Table(
        box=box.SIMPLE_HEAD, title="Held-out tasks", title_justify="left", show_header=True, pad_edge=False
    )
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    for name in names:
        cells = (name.removeprefix("eval/"), f"{before[name]:.4g}", f"{after[name]:.4g}")
        table.add_row(*(Text(cell) for cell in cells))
        log_to_file(logger, f"{cells[0]}: {cells[1]} before training, {cells[2]} after")
    terminal().print(table)


def _ks(num_samples: int) -> list[int]:
    """Powers of two up to `num_samples`, and that itself."""
    powers = [2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples]
    return sorted({*powers, num_samples})


def _trace_row(answer: Answer, version: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "version": version,
        "source": answer.source,
        "task": answer.task,
        "sample": answer.sample,
    }
    if isinstance(answer.result, EpisodeFailed):
        return {**row, "failed": answer.result.kind, "error": answer.result.message}
    return {**row, **describe_episode(answer.result)}


def _first(messages: Any, role: str) -> Any:
    return next((message.get("content") for message in messages if message.get("role") == role), "")


def _text(content: Any) -> str:
    text = content if isinstance(content, str) else "" if content is None else str(content)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
