"""Rollouts as step batches, from a channel in memory."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from contract.batch import MicroBatch, StepBatch
from contract.errors import ChannelError, DataError
from contract.rollout import Message, WireSample, encode_message
from tests.support.engine import rank_process
from tests.support.ranks import run_ranks
from tests.support.stream import (
    MemoryReceiver,
    batch_message,
    end_message,
    open_source,
    rl_sample,
    snapshot_of,
)
from trainer.parallel.process import Process
from trainer.source.base import PENDING
from trainer.source.stream import NO_SNAPSHOT, SLICE_SECONDS, StreamSource
from trainer.state import TrainState


def take(source: StreamSource) -> StepBatch:
    batch = source.next_step()
    assert isinstance(batch, StepBatch)
    return batch


def ids(micro_batches: list[MicroBatch]) -> list[tuple[int, ...]]:
    return [item.sample_ids for item in micro_batches]


def test_a_message_becomes_rows_with_every_stream_and_what_it_says_of_the_step(process: Process) -> None:
    samples = [rl_sample(9, 3, num_prompt=4), rl_sample(10, 1), rl_sample(6, 2)]
    receiver = MemoryReceiver({1: batch_message(1, samples, num_episodes=2)})
    source = open_source(receiver, process)
    batch = take(source)
    assert (batch.num_samples, batch.epoch) == (3, 0.25)
    assert batch.metrics == {"reward/mean": 0.125, "episodes/trained": 2.0}
    # 10 and 6 tokens fill a row of 16.
    first, second = batch.micro_batches
    assert (first.sample_ids, second.sample_ids) == ((3,), (1, 2))
    assert first.weights.keys() == {"rl", "ce", "ref_kl"}
    np.testing.assert_array_equal(first.weights["rl"], [0, 0, 0, 1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(first.streams["advantages"], 2 * first.weights["rl"])
    np.testing.assert_array_equal(first.streams["logprobs"], -first.weights["rl"])
    np.testing.assert_array_equal(first.tokens, samples[0].tokens)
    assert source.snapshot == snapshot_of(1)
    assert receiver.acknowledged == [1]


def test_rows_are_grouped_by_micro_batch_size_and_padded_to_one_shape_if_asked(process: Process) -> None:
    samples = [rl_sample(12, index) for index in range(3)]
    receiver = MemoryReceiver({1: batch_message(1, samples)})
    batch = take(open_source(receiver, process, micro_batch_size=2))
    assert [len(item.tokens) for item in batch.micro_batches] == [24, 12]
    batch = take(open_source(receiver, process, micro_batch_size=2, pad=True))
    assert [len(item.tokens) for item in batch.micro_batches] == [32, 32]
    assert [item.num_tokens for item in batch.micro_batches] == [24, 12]


def test_a_message_without_samples_is_a_step_without_loss(process: Process) -> None:
    batch = take(open_source(MemoryReceiver({1: batch_message(1)}), process))
    (row,) = batch.micro_batches
    assert (row.num_tokens, row.count_trainable("rl"), len(row.tokens)) == (0, 0, 1)


def test_batches_follow_the_step_of_the_run(process: Process) -> None:
    state = TrainState(step=6)
    frames = {step: batch_message(step, [rl_sample(8, step)]) for step in (1, 7, 8)}
    source = open_source(MemoryReceiver(frames), process, state)
    assert ids([*take(source).micro_batches]) == [(7,)]
    state.step += 1
    assert ids([*take(source).micro_batches]) == [(8,)]
    assert source.state_dict() == {"stream_step": 7}


def test_a_batch_that_has_not_come_is_pending_and_waited_for_in_short_slices(process: Process) -> None:
    receiver = MemoryReceiver({})
    source = open_source(receiver, process)
    assert [source.next_step() for _ in range(3)] == [PENDING] * 3
    assert max(receiver.waits) <= SLICE_SECONDS == 1.0
    receiver.frames[1] = encode_message(batch_message(1, [rl_sample(8)]))
    assert take(source).num_samples == 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_ends_at_its_limit_and_says_what_was_waited_for(process: Process) -> None:
    receiver, clock = MemoryReceiver({}), Clock()
    source = open_source(receiver, process, TrainState(step=4), timeout_seconds=2.5, clock=clock)
    for clock.now in (100.0, 102.0, 102.25):
        assert source.next_step() is PENDING
    clock.now = 102.5
    message = r"no batch for step 5 came within batch_timeout_seconds = 2\.5 s.*in memory"
    with pytest.raises(ChannelError, match=message):
        source.next_step()
    assert receiver.waits == [1.0, 0.5, 0.25, 0.0]


def test_the_limit_of_a_wait_begins_anew_with_every_batch(process: Process) -> None:
    state, clock = TrainState(), Clock()
    receiver = MemoryReceiver({1: batch_message(1)})
    source = open_source(receiver, process, state, timeout_seconds=2.5, clock=clock)
    take(source)
    state.step, clock.now = 1, 200.0
    assert source.next_step() is PENDING
    clock.now = 202.5
    with pytest.raises(ChannelError, match="no batch for step 2"):
        source.next_step()


BAD_SAMPLE = WireSample(b"\0" * 32, {"rl": b"\0" * 28}, {}, 5)
UNKNOWN_STREAM = WireSample(b"\0" * 32, {}, {"values": b"\0" * 32}, 5)
REFUSED: dict[str, tuple[Message | bytes, str]] = {
    "of another run": (batch_message(3, run_id="other"), "message of run 'other' came to run 'run'"),
    "of another step": (replace(batch_message(3), step=2), "message 3 holds the batch of step 2"),
    "out of order": (batch_message(3, sequence=2), "message 2 came where 3 is due"),
    "from the future": (batch_message(3, newest_version=3), "sampled by versions 2 to 3"),
    "damaged": (encode_message(batch_message(3))[:-1] + b"x", "is damaged"),
    "too long": (batch_message(3, [rl_sample(17, 8)]), "sample 8 of the batch of step 3 has 17 tokens"),
    "empty": (batch_message(3, [rl_sample(0, 8)]), "sample 8 of the batch of step 3 has 0 tokens"),
    "short stream": (replace(batch_message(3), samples=[BAD_SAMPLE]), "8 tokens and 7 values in stream 'rl'"),
    "unknown": (replace(batch_message(3), samples=[UNKNOWN_STREAM]), "stream 'values'"),
    "end of another run": (end_message(3, run_id="other"), "message of run 'other'"),
    "early end": (end_message(4), "message 4 came where 3 is due"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_due_is_refused_and_not_acknowledged(case: str, process: Process) -> None:
    frame, message = REFUSED[case]
    receiver = MemoryReceiver({3: frame})
    source = open_source(receiver, process, TrainState(step=2))
    with pytest.raises(ChannelError, match=message):
        source.next_step()
    assert receiver.acknowledged == [] and source.snapshot == NO_SNAPSHOT


def test_an_end_before_the_last_step_ends_the_data_with_a_warning(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = MemoryReceiver({3: end_message(3, reason="all 5 tasks were drawn once")})
    source = open_source(receiver, process, TrainState(step=2))
    with caplog.at_level(logging.WARNING):
        assert source.next_step() is None
    assert "ends the run after step 2: all 5 tasks were drawn once" in caplog.text
    assert source.next_step() is None and receiver.acknowledged == [3]
    assert source.next_end() is source.end and source.end is not None


def test_after_the_last_step_the_end_is_waited_for_and_nothing_else_taken(process: Process) -> None:
    receiver = MemoryReceiver({})
    source = open_source(receiver, process, TrainState(step=2))
    assert source.next_end() is PENDING
    receiver.frames[3] = encode_message(end_message(3))
    end = source.next_end()
    assert end is not PENDING and end.metrics == {"eval/words/mean": 0.75} and receiver.acknowledged == [3]
    source = open_source(MemoryReceiver({3: batch_message(3)}), process, TrainState(step=2))
    with pytest.raises(ChannelError, match="after the last step, 2, a batch for step 3 came"):
        source.next_end()


def test_a_wait_for_the_end_says_that_it_is_for_the_end(process: Process) -> None:
    clock = Clock()
    source = open_source(MemoryReceiver({}), process, TrainState(step=2), timeout_seconds=2.5, clock=clock)
    assert source.next_end() is PENDING
    clock.now += 3
    message = r"no end of the run from the orchestrator, whose last evaluation.*came within batch_timeout"
    with pytest.raises(ChannelError, match=message):
        source.next_end()


def test_a_position_of_other_data_is_refused(process: Process) -> None:
    source = open_source(MemoryReceiver({}), process)
    source.load_state_dict(source.state_dict())
    with pytest.raises(DataError, match=r"holds \['identity', 'num_rows_taken'\].*set resume\.skip_data"):
        source.load_state_dict({"num_rows_taken": 4, "identity": {}})


class BrokenReceiver(MemoryReceiver):
    """Its disk fails."""

    def receive(self, sequence: int, timeout_seconds: float) -> bytes | None:
        raise OSError(5, "Input/output error")


def take_on_ranks() -> list[Any]:
    """A batch of two ranks, then one that has not come, and one that cannot be read."""
    process, state = rank_process(), TrainState()
    samples = [rl_sample(length, index) for index, length in enumerate([16, 9, 12])]
    source = open_source(MemoryReceiver({1: batch_message(1, samples)}), process, state)
    found: list[Any] = [ids([*take(source).micro_batches]), source.snapshot]
    state.step = 1
    found.append(source.next_step() is PENDING)
    for receiver in (BrokenReceiver({}), MemoryReceiver({2: REFUSED["damaged"][0]})):
        try:
            open_source(receiver, process, state).next_step()
        except (ChannelError, OSError) as error:
            found.append(str(error))
    return found


def test_ranks_share_a_batch_evenly_and_learn_of_the_failure_of_the_first() -> None:
    first, second = run_ranks(take_on_ranks, 2)
    # Three rows, of 16, 12 and 9 tokens: the first rank gets an empty one too.
    assert (first[0], second[0]) == ([(0,), ()], [(2,), (1,)])
    assert first[1] == second[1] == snapshot_of(1)
    assert first[2] and second[2]
    assert "Input/output error" in first[3] and second[3].startswith("rank 0: OSError")
    assert "is damaged" in first[4] and first[4] == second[4]
