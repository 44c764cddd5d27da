"""Messages of an orchestrator, and a channel in memory that delivers them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from contract.batch import Sample
from contract.rollout import Message, RolloutBatch, RunEnd, encode_message, to_wire
from trainer.parallel.process import Process
from trainer.source.stream import Rows, StreamSource
from trainer.state import TrainState

RUN_ID = "run"


def rl_sample(length: int, sample_id: int = 0, *, num_prompt: int = 1) -> Sample:
    """Tokens that count up from the id; those after the prompt were sampled."""
    tokens = np.arange(sample_id, sample_id + length, dtype=np.int64) % 90
    weights = (np.arange(length) >= num_prompt).astype(np.float32)
    streams = {"logprobs": -weights, "advantages": 2 * weights, "temperatures": weights}
    return Sample(tokens, {"rl": weights}, sample_id, streams)


def batch_message(step: int, samples: Sequence[Sample] = (), **fields: Any) -> RolloutBatch:
    """The batch of `step`, sampled by the version before it; `fields` replace what is made up here."""
    made_up: dict[str, Any] = {
        "run_id": RUN_ID,
        "step": step,
        "sequence": step,
        "oldest_version": step - 1,
        "newest_version": step - 1,
        "num_episodes": len(samples),
        "epoch": step / 4,
        "samples": [to_wire(sample) for sample in samples],
        "metrics": {"reward/mean": step / 8},
        "snapshot": snapshot_of(step),
    }
    return RolloutBatch(**{**made_up, **fields})


def snapshot_of(step: int) -> bytes:
    """The orchestrator's state in `batch_message(step)`."""
    return b'{"position": %d}' % (10 * step)


def end_message(sequence: int, **fields: Any) -> RunEnd:
    """The end of the run after batch `sequence - 1`."""
    made_up: dict[str, Any] = {
        "run_id": RUN_ID,
        "sequence": sequence,
        "reason": "all batches are sent",
        "metrics": {"eval/words/mean": 0.75},
    }
    return RunEnd(**{**made_up, **fields})


class MemoryReceiver:
    """Delivers given frames, and notes what is asked of it. Never waits.

    Args:
        frames: by sequence; messages are encoded.
        on_missing: called with a sequence that is not there.
    """

    def __init__(
        self, frames: Mapping[int, Message | bytes], on_missing: Callable[[int], None] | None = None
    ) -> None:
        self.frames = {
            sequence: frame if isinstance(frame, bytes) else encode_message(frame)
            for sequence, frame in frames.items()
        }
        self.on_missing = on_missing
        self.waits: list[float] = []
        self.acknowledged: list[int] = []

    def receive(self, sequence: int, timeout_seconds: float) -> bytes | None:
        self.waits.append(timeout_seconds)
        frame = self.frames.get(sequence)
        if frame is None and self.on_missing is not None:
            self.on_missing(sequence)
        return frame

    def acknowledge(self, sequence: int) -> None:
        self.acknowledged.append(sequence)

    def close(self) -> None:
        raise AssertionError("whoever opened a receiver closes it")


def open_source(
    receiver: MemoryReceiver,
    process: Process,
    state: TrainState | None = None,
    *,
    seq_len: int = 16,
    micro_batch_size: int = 1,
    pad: bool = False,
    timeout_seconds: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> StreamSource:
    """A source that reads `receiver` on rank 0."""
    return StreamSource(
        receiver if process.is_main else None,
        process,
        state or TrainState(),
        Rows(seq_len, micro_batch_size, pad),
        run_id=RUN_ID,
        timeout_seconds=timeout_seconds,
        place="in memory",
        clock=clock,
    )
