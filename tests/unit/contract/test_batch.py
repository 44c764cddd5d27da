"""Micro-batches: documents laid end to end, shifted targets and weights, padding."""

from __future__ import annotations

import numpy as np
import pytest

from contract.batch import Sample, build_micro_batch


def sample(tokens: list[int], sample_id: int, **weights: list[float]) -> Sample:
    streams = {name: np.array(stream, dtype=np.float32) for name, stream in weights.items()}
    return Sample(np.array(tokens), streams, sample_id)


FIRST = sample([10, 11, 12], 7, ce=[9, 1, 0.5])
SECOND = sample([20, 21], 3, ce=[9, 2], rl=[9, 4])


def test_documents_stand_end_to_end_with_positions_that_restart() -> None:
    micro_batch = build_micro_batch([[FIRST, SECOND]])
    assert micro_batch.tokens.tolist() == [10, 11, 12, 20, 21]
    assert micro_batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert micro_batch.cu_seqlens.tolist() == [0, 3, 5]
    assert micro_batch.cu_seqlens.dtype == np.int32
    assert micro_batch.sample_ids == (7, 3)
    assert micro_batch.num_tokens == 5


def test_targets_and_weights_are_shifted_and_no_loss_crosses_a_join() -> None:
    micro_batch = build_micro_batch([[FIRST, SECOND]])
    assert micro_batch.targets[[0, 1, 3]].tolist() == [11, 12, 21]
    assert micro_batch.weights["ce"].tolist() == [1, 0.5, 0, 2, 0]  # the weight of a first token is ignored
    assert micro_batch.weights["rl"].tolist() == [0, 0, 0, 4, 0]
    assert micro_batch.count_trainable("ce") == 3
    assert micro_batch.count_trainable("rl") == 1
    assert micro_batch.count_trainable("ref_kl") == 0


def test_several_rows_are_one_longer_row() -> None:
    together, apart = build_micro_batch([[FIRST, SECOND]]), build_micro_batch([[FIRST], [], [SECOND]])
    for name in ("tokens", "targets", "position_ids", "cu_seqlens"):
        assert np.array_equal(getattr(together, name), getattr(apart, name))


def test_padding_stands_at_the_end_one_document_a_row_without_loss() -> None:
    micro_batch = build_micro_batch(
        [[FIRST], [SECOND], [], [sample([1, 2, 3, 4], 5, ce=[0, 1, 1, 1])]], pad_to=4, pad_token=99
    )
    assert micro_batch.tokens.tolist() == [10, 11, 12, 20, 21, 1, 2, 3, 4] + [99] * 7
    assert micro_batch.cu_seqlens.tolist() == [0, 3, 5, 9, 10, 12, 16]
    assert micro_batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0, 1, 0, 1, 2, 3]
    assert not micro_batch.weights["ce"][9:].any()
    assert micro_batch.num_tokens == 9
    assert micro_batch.sample_ids == (7, 3, 5)


def test_a_micro_batch_without_samples_is_one_token_without_loss_in_the_components_asked_for() -> None:
    micro_batch = build_micro_batch([[]], components=("ce",))
    assert micro_batch.tokens.tolist() == [0]
    assert micro_batch.cu_seqlens.tolist() == [0, 1]
    assert micro_batch.weights["ce"].tolist() == [0]
    assert micro_batch.num_tokens == 0 and micro_batch.sample_ids == ()


def test_a_row_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="a row of 5 tokens does not fit into pad_to = 4"):
        build_micro_batch([[FIRST, SECOND]], pad_to=4)
