"""From the groups of a batch to the message for the trainer, its metrics and its trace. Pure functions.

Metrics of rewards and lengths are of every valid episode that was judged since the last batch, those of
groups without signal too: an average over what is trained would leave out just the tasks that are always, or
never, solved. All others are of the episodes that are trained on.

Values that depend on wall time have names that start with `time/` or `rate/`; without a lead no other value
does, as long as nothing fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contract.rollout import RolloutBatch, to_wire
from orchestrator.dispatch import Taken
from orchestrator.group import EpisodeStats, JudgedGroup
from orchestrator.staleness import age_in_batch
from orchestrator.trace import describe_episode


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """What a message says besides its samples.

    Attributes:
        extra: further metrics: times, an evaluation.
    """

    run_id: str
    step: int
    epoch: float
    snapshot: bytes
    extra: Mapping[str, float]


def build_batch(taken: Taken, info: BatchInfo) -> RolloutBatch:
    """The message of one batch."""
    episodes = [one.episode for group in taken.groups for one in group.episodes]
    return RolloutBatch(
        run_id=info.run_id,
        step=info.step,
        sequence=info.step,
        oldest_version=min(episode.oldest_version for episode in episodes),
        newest_version=max(episode.newest_version for episode in episodes),
        num_episodes=len(episodes),
        epoch=info.epoch,
        samples=[
            to_wire(sample) for group in taken.groups for one in group.episodes for sample in one.samples
        ],
        metrics={**compute_metrics(taken, info.step), **info.extra},
        snapshot=info.snapshot,
    )


def trace_rows(groups: Iterable[JudgedGroup], step: int) -> list[dict[str, Any]]:
    """One object per episode of the batch."""
    return [
        {
            "step": step,
            "position": group.draw.position,
            "source": group.source,
            "task": group.draw.task,
            "epoch": group.draw.epoch,
            "attempt": group.draw.attempt,
            "episode": one.index,
            "advantage": one.advantage,
            **describe_episode(one.episode),
        }
        for group in groups
        for one in group.episodes
    ]


def compute_metrics(taken: Taken, step: int) -> dict[str, float]:
    """The metrics of one batch; every value is finite."""
    tally, groups = taken.tally, taken.groups
    stats = [*tally.stats, *(stat for group in groups for stat in group.stats)]
    # The order of completion must not decide how sums are rounded.
    stats.sort(key=lambda stat: (stat.position, stat.index))
    scored = [one for group in groups for one in group.episodes]
    num_judged = len(groups) + tally.num_no_signal + tally.num_failed_groups
    num_again = tally.num_stale + tally.num_outage
    ages = _ages(groups, step)
    metrics = {
        **_reward_metrics(stats),
        "length/mean": _mean([stat.num_sampled for stat in stats]),
        "length/max": float(max(stat.num_sampled for stat in stats)),
        "length/truncated": _mean([stat.is_truncated for stat in stats]),
        "turns/mean": _mean([stat.num_turns for stat in stats]),
        "groups/trained": float(len(groups)),
        "groups/signal": len(groups) / num_judged,
        "groups/dropped": float(tally.num_no_signal + tally.num_failed_groups + num_again),
        "groups/dropped_no_signal": float(tally.num_no_signal),
        "groups/dropped_failed": float(tally.num_failed_groups),
        "groups/dropped_stale": float(tally.num_stale),
        "groups/dropped_outage": float(tally.num_outage),
        "episodes/trained": float(len(scored)),
        "episodes/failed": float(tally.failures.total()),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "tokens/sampled": float(len(ages)),
        "advantages/abs_mean": _mean([abs(one.advantage) for one in scored]),
        "rollout/wasted_tokens": float(tally.wasted_tokens),
    }
    if tally.no_signal_rewards:
        metrics["groups/no_signal_reward"] = _mean(tally.no_signal_rewards)
    for kind, count in sorted(tally.failures.items()):
        metrics[f"episodes/failed/{kind.replace(' ', '_')}"] = float(count)
    return metrics


def _reward_metrics(stats: Sequence[EpisodeStats]) -> dict[str, float]:
    rewards = [stat.reward for stat in stats]
    mean = _mean(rewards)
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards])),
    }
    for name in sorted({name for stat in stats for name in stat.rewards} - {"reward"}):
        # A reward that an environment calls "mean" must not replace the mean of all.
        key = f"reward/{name}" if f"reward/{name}" not in metrics else f"reward/{name}_"
        metrics[key] = _mean([stat.rewards[name] for stat in stats if name in stat.rewards])
    for source in sorted({stat.source for stat in stats}):
        metrics[f"reward/{source}/mean"] = _mean([stat.reward for stat in stats if stat.source == source])
    return metrics


def _ages(groups: Iterable[JudgedGroup], step: int) -> np.ndarray:
    """Of every token that is trained on."""
    versions = [
        np.asarray(sample.versions)[np.asarray(sample.is_sampled, dtype=bool)]
        for group in groups
        for one in group.episodes
        for sample in one.episode.samples
    ]
    return age_in_batch(step, 0) - np.concatenate(versions)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
