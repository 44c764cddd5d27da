"""The message of a batch and its metrics, by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import RunFolderError
from contract.rollout import decode_message, encode_message, from_wire
from orchestrator.assemble import BatchInfo, build_batch, compute_metrics, trace_rows
from orchestrator.credit.grpo import GRPO
from orchestrator.dispatch import Taken, Tally
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.group import JudgedGroup, judge
from orchestrator.plan import Draw
from orchestrator.trace import trace_path, write_trace
from tests.support.rollouts import make_episode


def _groups() -> list[JudgedGroup]:
    """For batch 5, which is trained from version 4."""
    one = [
        replace(make_episode(1.0, [4, 4], rewards={"length": 2.0}), num_turns=3),
        make_episode(0.0, [2, 3, 4], truncated=True),
        EpisodeFailed("prompt too long", "no room"),
    ]
    other = [make_episode(0.5, [3]), make_episode(0.0, [4, 4]), make_episode(0.1, [4])]
    return [
        judge(Draw(8, 0, 3, 1), "a", one, credit=GRPO(normalize_std=False), temperature=0.5),
        judge(Draw(9, 1, 0, 0, 2), "b", other, credit=GRPO(normalize_std=False), temperature=0.5),
    ]


def _taken() -> Taken:
    equal = judge(
        Draw(7, 0, 1, 1),
        "a",
        [make_episode(1.0, [4] * 10)] * 3,
        credit=GRPO(normalize_std=False),
        temperature=0.5,
    )
    tally = Tally(
        2, 2, 3, Counter({"timeout": 4, "prompt too long": 1}), 50, list(equal.stats), 4, [1.0, 0.5]
    )
    return Taken(_groups(), tally)


def test_metrics_of_a_batch() -> None:
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 0.5, 0.0, 0.1]
    mean = sum(rewards) / 8
    metrics = compute_metrics(_taken(), 5)
    assert metrics == pytest.approx(
        {
            # Of every episode that was judged: three of a group without signal among them.
            "reward/mean": mean,
            "reward/std": math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 8),
            "reward/length": 2.0,
            "reward/a/mean": 4 / 5,
            "reward/b/mean": 0.2,
            "length/mean": (30 + 2 + 3 + 1 + 2 + 1) / 8,
            "length/max": 10.0,
            "length/truncated": 1 / 8,
            "turns/mean": (3 + 7) / 8,
            "groups/trained": 2.0,
            "groups/signal": 2 / 6,
            "groups/dropped": 11.0,
            "groups/dropped_no_signal": 2.0,
            "groups/no_signal_reward": 0.75,
            "groups/dropped_failed": 2.0,
            "groups/dropped_stale": 3.0,
            "groups/dropped_outage": 4.0,
            "episodes/trained": 5.0,
            "episodes/failed": 5.0,
            "episodes/failed/timeout": 4.0,
            "episodes/failed/prompt_too_long": 1.0,
            # Of the tokens that are trained: ages 0 0, 2 1 0, 1, 0 0, 0.
            "staleness/mean": 4 / 9,
            "staleness/max": 2.0,
            "tokens/sampled": 9.0,
            "advantages/abs_mean": (0.5 + 0.5 + 0.3 + 0.2 + 0.1) / 5,
            "rollout/wasted_tokens": 50.0,
        }
    )


def test_the_message_says_what_it_is_and_holds_the_samples_in_order() -> None:
    info = BatchInfo("run", 5, 0.75, b"{}", {"time/rollout": 1.5})
    batch = decode_message(encode_message(build_batch(_taken(), info)))
    assert (batch.run_id, batch.sequence, batch.metrics["time/rollout"]) == ("run", 5, 1.5)
    assert (batch.step, batch.epoch, batch.num_episodes) == (5, 0.75, 5)  # pyright: ignore
    assert (batch.oldest_version, batch.newest_version) == (2, 4)  # pyright: ignore
    samples = [from_wire(sample) for sample in batch.samples]  # pyright: ignore
    assert [sample.sample_id for sample in samples] == [24, 25, 27, 28, 29]
    assert samples[0].streams["advantages"].tolist() == [0.0, 0.5, 0.5]
    assert samples[0].streams["temperatures"].tolist() == [0.5] * 3
    assert samples[0].weights["rl"].tolist() == [0.0, 1.0, 1.0]


def test_a_trace_tells_of_every_episode_what_was_trained() -> None:
    rows = trace_rows(_groups(), 5)
    assert [(row["position"], row["episode"]) for row in rows] == [(8, 0), (8, 1), (9, 0), (9, 1), (9, 2)]
    assert rows[1] == {
        "step": 5,
        "position": 8,
        "source": "a",
        "task": 3,
        "epoch": 1,
        "attempt": 0,
        "episode": 1,
        "advantage": -0.5,
        "reward": 0.0,
        "rewards": {"reward": 0.0},
        "num_turns": 1,
        "truncated": True,
        "finish_reason": "length",
        "versions": [2, 4],
        "num_tokens": 3,
        "messages": [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "answer"},
        ],
    }


def test_a_trace_replaces_an_older_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = trace_path(tmp_path / "rollouts", 3)
    write_trace(path, [{"a": 1}])
    write_trace(path, [{"a": "ü\n"}, {"b": 2}])
    assert path.read_text(encoding="utf-8") == '{"a":"ü\\n"}\n{"b":2}\n'
    assert [entry.name for entry in path.parent.iterdir()] == ["step_3.jsonl"]


def test_a_trace_that_cannot_be_written_is_an_error_and_no_half_a_file(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("in the way")
    with pytest.raises(RunFolderError, match="cannot write the trace"):
        write_trace(trace_path(tmp_path / "rollouts", 3), [{"a": 1}])
