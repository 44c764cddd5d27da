"""A stream of rollouts as a source of step batches (RL): one message of the orchestrator is one update.

Rank 0 alone reads the channel. It decodes and checks a frame, acknowledges it, and hands its bytes to the
others, which decode the same: so every rank packs the same samples, and takes its own rows of them. A frame
is acknowledged before it is trained on, because nobody needs it again: a run that dies goes on from its last
checkpoint, and its orchestrator samples anew what came after.

What the samples mean is left to the objective; what the channel is, to `contract.channel`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from contract.batch import MicroBatch, Sample, StepBatch, build_micro_batch
from contract.channel.base import Receiver
from contract.errors import ChannelError, DataError, TailraceError
from contract.packing import pack_balanced
from contract.rollout import COMPONENTS, Message, RolloutBatch, RunEnd, decode_message, from_wire
from trainer.parallel.process import Process
from trainer.source.base import PENDING, Pending
from trainer.state import TrainState

logger = logging.getLogger(__name__)

SLICE_SECONDS = 1.0
"""Longest wait of one `next_step`: in between, all ranks decide whether the run ends."""

NO_SNAPSHOT = b"null"
"""In place of the orchestrator's state, before the first batch."""

_NOTHING, _FRAME, _ERROR = range(3)
_END = "end of the run from the orchestrator, whose last evaluation comes before it,"


@dataclass(frozen=True, slots=True)
class Rows:
    """How samples become micro-batches.

    Attributes:
        seq_len: most tokens of a row, and of a sample.
        micro_batch_size: most rows of a micro-batch.
        pad: whether every row is padded to `seq_len`, and every micro-batch to `micro_batch_size` rows
            (static shapes).
    """

    seq_len: int
    micro_batch_size: int
    pad: bool = False


class StreamSource:
    """Batches of rollouts in the order of their steps. Implements `Source`; all methods are collective.

    Attributes:
        snapshot: the orchestrator's state (JSON) after the batch that was handed out last, or as loaded.
        end: the end of the run, once the orchestrator has announced it.
    """

    def __init__(
        self,
        receiver: Receiver | None,
        process: Process,
        state: TrainState,
        rows: Rows,
        *,
        run_id: str,
        timeout_seconds: float,
        place: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            receiver: the trainer's end of the channel, on rank 0; None on the others.
            state: of the run: the next batch is that of its next step.
            run_id: of the run; a message of another one is refused.
            timeout_seconds: longest wait for a message.
            place: what the batches come through, and where to look if none does, for messages.
        """
        assert (receiver is not None) == process.is_main
        self._receiver = receiver
        self._process = process
        self._state = state
        self._rows = rows
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._place = place
        self._clock = clock
        self._deadline: float | None = None
        self.snapshot = NO_SNAPSHOT
        self.end: RunEnd | None = None

    @property
    def steps_left(self) -> int | None:
        """None: the orchestrator decides when the run ends."""
        return None

    def next_step(self) -> StepBatch | Pending | None:
        """See `Source`; waits for at most `SLICE_SECONDS`. None after the orchestrator has ended the run.

        Raises:
            ChannelError: a message did not come in time, is damaged, or not the one that is due; raised on
                every rank.
        """
        message = (
            self._next_message(f"batch for step {self._state.step + 1}") if self.end is None else self.end
        )
        if isinstance(message, Pending):
            return PENDING
        if isinstance(message, RunEnd):
            if self._process.is_main:
                logger.warning(
                    "the orchestrator ends the run after step %d: %s", self._state.step, message.reason
                )
            return None
        samples = [from_wire(sample) for sample in message.samples]
        self.snapshot = message.snapshot
        metrics = {**message.metrics, "episodes/trained": float(message.num_episodes)}
        return StepBatch(self._pack(samples), len(samples), message.epoch, metrics)

    def next_end(self) -> RunEnd | Pending:
        """After the last step: the end of the run, or `PENDING` after at most `SLICE_SECONDS`.

        Raises:
            ChannelError: as `next_step`; also if another batch comes.
        """
        message = self._next_message(_END) if self.end is None else self.end
        if isinstance(message, RolloutBatch):
            raise ChannelError(
                f"after the last step, {self._state.step}, a batch for step {message.step} came through "
                f"{self._place}; max_steps of trainer and orchestrator differ"
            )
        return message

    def state_dict(self) -> dict[str, Any]:
        """The step of the last batch, which is that of the run; equal on all ranks."""
        return {"stream_step": self._state.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Source`; the position itself is the run's step.

        Raises:
            DataError: `state` is none of this kind of source.
        """
        if not isinstance(state.get("stream_step"), int):
            raise DataError(
                f"the checkpoint's data position is not one of a stream of rollouts (it holds "
                f"{sorted(state)}); set resume.skip_data to start with the tasks from the beginning"
            )

    def summary(self) -> dict[str, str]:
        """Lines for the start-up summary: title and value."""
        return {"data": f"rollouts, {self._place}"}

    def _next_message(self, awaited: str) -> Message | Pending:
        """
        Args:
            awaited: what is waited for, in words.
        """
        kind, content, error = _NOTHING, b"", None
        message: Message | None = None
        if self._process.is_main:
            try:
                received = self._receive(awaited)
                if received is not None:
                    (content, message), kind = received, _FRAME
            except Exception as failure:  # the others wait for this rank, and must learn of every failure
                told = str(failure) if isinstance(failure, TailraceError) else f"rank 0: {failure!r}"
                kind, content, error = _ERROR, told.encode(), failure
        kind, content = self._process.share(kind, content)
        if error is not None:
            raise error
        if kind == _ERROR:
            raise ChannelError(content.decode())
        if kind == _NOTHING:
            return PENDING
        if message is None:  # not on rank 0, which has decoded it to check it
            message = decode_message(content)
        if isinstance(message, RunEnd):
            self.end = message
        return message

    def _receive(self, awaited: str) -> tuple[bytes, Message] | None:
        """On rank 0: the next frame and what it says, checked and acknowledged; None if it has not come
        yet.
        """
        assert self._receiver is not None
        sequence = self._state.step + 1
        now = self._clock()
        if self._deadline is None:
            self._deadline = now + self._timeout_seconds
        frame = self._receiver.receive(sequence, max(0.0, min(SLICE_SECONDS, self._deadline - now)))
        if frame is None:
            if self._clock() >= self._deadline:
                raise ChannelError(
                    f"no {awaited} came within batch_timeout_seconds = "
                    f"{self._timeout_seconds:g} s; the trainer waits for it {self._place}"
                )
            return None
        self._deadline = None
        message = decode_message(frame)
        self._check(message, sequence)
        self._receiver.acknowledge(sequence)
        return frame, message

    def _check(self, message: Message, sequence: int) -> None:
        """Refuse what is not due.

        Raises:
            ChannelError: the message is of another run or step, or its samples are malformed.
        """
        if message.run_id != self._run_id:
            raise ChannelError(
                f"a message of run {message.run_id!r} came to run {self._run_id!r} ({self._place}); end the "
                "orchestrator of the other run, or give this one a channel of its own"
            )
        if message.sequence != sequence:
            raise ChannelError(
                f"message {message.sequence} came where {sequence} is due ({self._place}): it is left over "
                "from another attempt, or the orchestrator went on from another step than the trainer"
            )
        if isinstance(message, RunEnd):
            return
        if message.step != sequence or message.newest_version >= sequence:
            raise ChannelError(
                f"message {sequence} holds the batch of step {message.step}, sampled by versions "
                f"{message.oldest_version} to {message.newest_version} ({self._place}); step {sequence} is "
                f"due, whose samples come from versions up to {sequence - 1}"
            )
        for sample in map(from_wire, message.samples):
            if not 1 <= len(sample.tokens) <= self._rows.seq_len:
                raise ChannelError(
                    f"sample {sample.sample_id} of the batch of step {sequence} has {len(sample.tokens)} "
                    f"tokens; 1 to seq_len = {self._rows.seq_len} fit into a row"
                )

    def _pack(self, samples: list[Sample]) -> list[MicroBatch]:
        """This rank's micro-batches."""
        size, pad = self._rows.micro_batch_size, self._rows.pad
        dealt = pack_balanced(
            [len(sample.tokens) for sample in samples],
            self._rows.seq_len,
            self._process.world_size,
            multiple=size if pad else 1,
        )
        rows = [[samples[item] for item in row] for row in dealt[self._process.rank]]
        return [
            build_micro_batch(
                rows[start : start + size],
                pad_to=self._rows.seq_len if pad else None,
                components=COMPONENTS,
            )
            for start in range(0, len(rows), size)
        ]
