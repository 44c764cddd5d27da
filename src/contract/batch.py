"""Units of data that the trainer consumes: sample, micro-batch, step batch. Numpy only; no torch.

Shape legend: T tokens of a row, D documents of a row.

A micro-batch is always ONE row of packed documents. Several rows in one forward (`micro_batch_size > 1`) are
laid end to
end into one longer row: documents never attend to each other, so this equals a batch dimension and needs no
    padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence with its loss weights.

    Attributes:
        tokens: [T] token ids.
        weights: per loss component (`ce`, `rl`, `ref_kl`) the [T] weight of the loss of predicting
            `tokens[t]` from `tokens[:t]`; 0 is not trained. Position 0 has no prediction and its weight is
            ignored.
        sample_id: number of the source row, counted from 0 over all rows of the data set, dropped ones
            included.
        streams: further [T] values that an objective reads, by name, e.g. the log-probability (`logprobs`)
            with which `tokens[t]` was sampled from `tokens[:t]`; position 0 is ignored.
    """

    tokens: IntArray
    weights: Mapping[str, FloatArray]
    sample_id: int
    streams: Mapping[str, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row.

    Attributes:
        tokens: [T] token ids.
        targets: [T] the token that position t predicts; the last position of a document predicts nothing
            (weight 0).
        position_ids: [T] position inside the document; restarts at 0.
        cu_seqlens: [D + 1] int32 document boundaries: document d is `cu_seqlens[d]:cu_seqlens[d + 1]`.
        weights: per component the [T] weight of the loss at position t (already shifted like `targets`).
        sample_ids: source rows in this row, in order; padding has none.
        streams: further [T] values, shifted like `weights`; 0 where a sample has none.
    """

    tokens: IntArray
    targets: IntArray
    position_ids: IntArray
    cu_seqlens: npt.NDArray[np.int32]
    weights: Mapping[str, FloatArray]
    sample_ids: tuple[int, ...]
    streams: Mapping[str, FloatArray] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that came from samples: all positions but padding."""
        return int(self.cu_seqlens[len(self.sample_ids)])

    def count_trainable(self, component: str) -> int:
        """Tokens with a weight other than 0 in `component`."""
        stream = self.weights.get(component)
        return 0 if stream is None else int(np.count_nonzero(stream))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The micro-batches of ONE rank for one update, and what all ranks know of the update.

    Every rank has the same number of micro-batches: forward and backward are collective.
    """

    micro_batches: Sequence[MicroBatch]
    num_samples: int
    """Samples of this update over all ranks."""
    epoch: float
    """Passes over the data after this update, as a fraction (1.5 is half-way through the second)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further values to log, equal on all ranks."""


def build_micro_batch(
    rows: Sequence[Sequence[Sample]],
    *,
    pad_to: int | None = None,
    pad_token: int = 0,
    components: Sequence[str] = (),
) -> MicroBatch:
    """Lay the samples of one or more rows end to end.

    Args:
        rows: the samples of each row. An empty sequence gives a row without anything to train.
        pad_to: length of each row after padding (static shapes); None pads only an empty micro-batch, to one
            token.
        pad_token: id used for padding. Padding stands after the last sample, one document for each row that
            needs it (so that no position exceeds the longest row), with weight 0.
        components: loss components that get a stream even if no sample has it (a micro-batch of padding
            alone).

    Raises:
        ValueError: a row is longer than `pad_to`.
    """
    samples = [sample for row in rows for sample in row]
    paddings: list[int] = []
    if pad_to is not None:
        for row in rows:
            length = sum(len(sample.tokens) for sample in row)
            if length > pad_to:
                raise ValueError(f"a row of {length} tokens does not fit into pad_to = {pad_to}")
            if length < pad_to:
                paddings.append(pad_to - length)
    elif not samples:
        paddings.append(1)
    # All padding stands at the end, so that `num_tokens` is one boundary and no document is split.
    lengths = [len(sample.tokens) for sample in samples] + paddings
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])
    tokens = np.full(total, pad_token, dtype=np.int64)
    targets = np.full(total, pad_token, dtype=np.int64)
    position_ids = np.zeros(total, dtype=np.int64)
    present = {component for sample in samples for component in sample.weights} | set(components)
    weights = {component: np.zeros(total, dtype=np.float32) for component in sorted(present)}
    names = sorted({name for sample in samples for name in sample.streams})
    streams = {name: np.zeros(total, dtype=np.float32) for name in names}
    for index, length in enumerate(lengths):
        start, end = int(cu_seqlens[index]), int(cu_seqlens[index + 1])
        position_ids[start:end] = np.arange(length)
        if index >= len(samples):
            continue
        sample = samples[index]
        tokens[start:end] = sample.tokens
        targets[start : end - 1] = sample.tokens[1:]
        for component, stream in sample.weights.items():
            weights[component][start : end - 1] = stream[1:]
        for name, stream in sample.streams.items():
            streams[name][start : end - 1] = stream[1:]
    sample_ids = tuple(sample.sample_id for sample in samples)
    return MicroBatch(tokens, targets, position_ids, cu_seqlens, weights, sample_ids, streams)
