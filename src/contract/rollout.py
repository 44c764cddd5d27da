"""What the orchestrator sends the trainer: the samples of one update, or the end of the run. No torch.

A message is one frame: checksum, then MessagePack. It says of which run it is, which update it is for, and
which policy versions sampled it; the receiver refuses what it does not expect.

Legend: T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import xxhash

from contract.batch import FloatArray, IntArray, Sample
from contract.errors import ChannelError

_CHECKSUM_BYTES = 16

COMPONENTS = ("rl", "ce", "ref_kl")
"""Loss components, each with a weight stream and a denominator of its own."""
STREAMS = ("logprobs", "advantages", "ref_logprobs", "temperatures")
"""Streams beside the weights: what the sampler drew each token with, its advantage, the reference's
log-probability, and the temperature it was drawn at."""


class WireSample(msgspec.Struct, frozen=True):
    """A `Sample`, its arrays as little-endian bytes: int32 tokens, float32 streams, each of length T."""

    tokens: bytes
    weights: dict[str, bytes]
    streams: dict[str, bytes]
    sample_id: int


class RolloutBatch(msgspec.Struct, frozen=True, tag="batch"):
    """The samples of one update.

    Attributes:
        run_id: of the run folder; see `launcher`.
        step: the update that this is for: it turns version `step - 1` into `step`.
        sequence: number of this message among those of the run; equals `step`.
        oldest_version, newest_version: of the policies that sampled a trained token.
        num_episodes: that the samples came from.
        epoch: passes over the tasks, as a fraction.
        metrics: to be logged with the step.
        snapshot: the orchestrator's state after this batch (JSON), which becomes part of the checkpoint of
            `step`.
    """

    run_id: str
    step: int
    sequence: int
    oldest_version: int
    newest_version: int
    num_episodes: int
    epoch: float
    samples: list[WireSample]
    metrics: dict[str, float]
    snapshot: bytes


class RunEnd(msgspec.Struct, frozen=True, tag="end"):
    """No batch will follow.

    Attributes:
        sequence: one more than that of the last batch.
        reason: in words.
        metrics: of the last evaluation.
    """

    run_id: str
    sequence: int
    reason: str
    metrics: dict[str, float]


Message = RolloutBatch | RunEnd

_DECODER = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """One frame."""
    content = msgspec.msgpack.encode(message)
    return xxhash.xxh3_128_digest(content) + content


def decode_message(frame: bytes) -> Message:
    """The message in `frame`.

    Raises:
        ChannelError: it is damaged, or none.
    """
    content = memoryview(frame)[_CHECKSUM_BYTES:]
    if len(frame) < _CHECKSUM_BYTES or xxhash.xxh3_128_digest(content) != bytes(frame[:_CHECKSUM_BYTES]):
        raise ChannelError(
            f"a message of {len(frame)} bytes is damaged: its checksum is not that of its content"
        )
    try:
        return _DECODER.decode(content)
    except msgspec.DecodeError as error:
        raise ChannelError(f"a message is not one of this version of Tailrace: {error}") from error


def to_wire(sample: Sample) -> WireSample:
    """For a message."""
    return WireSample(
        np.asarray(sample.tokens, dtype="<i4").tobytes(),
        {name: _pack(stream) for name, stream in sample.weights.items()},
        {name: _pack(stream) for name, stream in sample.streams.items()},
        sample.sample_id,
    )


def from_wire(sample: WireSample) -> Sample:
    """Raises `ChannelError` if its streams do not have one value per token, or one is not known."""
    tokens: IntArray = np.frombuffer(sample.tokens, dtype="<i4").astype(np.int64)
    weights, streams = _unpack(sample.weights), _unpack(sample.streams)
    for known, given in ((COMPONENTS, weights), (STREAMS, streams)):
        for name, stream in given.items():
            if name not in known or len(stream) != len(tokens):
                raise ChannelError(
                    f"sample {sample.sample_id} has {len(tokens)} tokens and {len(stream)} values in stream "
                    f"{name!r}; known are {', '.join(known)}, of one value per token"
                )
    return Sample(tokens, weights, sample.sample_id, streams)


def _pack(stream: FloatArray) -> bytes:
    return np.asarray(stream, dtype="<f4").tobytes()


def _unpack(streams: Mapping[str, bytes]) -> dict[str, FloatArray]:
    return {name: np.frombuffer(content, dtype="<f4").astype(np.float32) for name, content in streams.items()}
