"""Synthetic rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.config.data import FakeDataConfig
from trainer.source.fake import FakeSource


def build(*, rank: int = 0, world_size: int = 1, seed: int = 0, **config: Any) -> FakeSource:
    settings = FakeDataConfig(**{"seq_len": 16, "batch_size": 4, "num_rows": 6, **config})
    return FakeSource(settings, vocab_size=50, rank=rank, world_size=world_size, seed=seed, max_epochs=2)


def tokens(source: FakeSource) -> list[np.ndarray]:
    batch = source.next_step()
    assert batch is not None
    return [micro_batch.tokens for micro_batch in batch.micro_batches]


def test_rows_are_full_and_every_token_but_the_first_of_a_document_is_trained() -> None:
    batch = build(document_len=6).next_step()
    assert batch is not None
    assert batch.num_samples == 4 * 3
    for micro_batch in batch.micro_batches:
        assert micro_batch.num_tokens == 16
        assert micro_batch.cu_seqlens.tolist() == [0, 6, 12, 16]
        assert micro_batch.count_trainable("ce") == 16 - 3
        assert micro_batch.tokens.min() >= 0 and micro_batch.tokens.max() < 50


def test_tokens_follow_seed_and_row_and_not_the_number_of_ranks() -> None:
    one, ranks = tokens(build()), [tokens(build(rank=rank, world_size=2)) for rank in range(2)]
    assert all(np.array_equal(one[row], ranks[row % 2][row // 2]) for row in range(4))
    assert not np.array_equal(one[0], one[1])
    assert not np.array_equal(one[0], tokens(build(seed=1))[0])


def test_the_position_is_state() -> None:
    source = build()
    tokens(source)
    resumed = build()
    resumed.load_state_dict(source.state_dict())
    assert all(np.array_equal(a, b) for a, b in zip(tokens(source), tokens(resumed), strict=True))


def test_the_stream_ends_after_its_epochs() -> None:
    source = build()
    assert source.steps_left == 3
    epochs = [batch.epoch for batch in iter(source.next_step, None)]
    assert epochs == [4 / 6, 8 / 6, 2.0]
