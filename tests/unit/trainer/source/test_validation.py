"""Held-out rows, dealt to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from contract.errors import DataError
from tests.unit.trainer.source.chats import short_chats
from trainer.config.data import ChatDataConfig, ValidationConfig
from trainer.source.validation import ValidationRows

Build = Callable[..., ValidationRows]


@pytest.fixture
def build(write_rows: Callable[..., Path], tokenizer: PreTrainedTokenizerBase) -> Build:
    path = write_rows(short_chats(13), "held_out.jsonl")

    def build(
        *,
        rank: int = 0,
        world_size: int = 1,
        pad_rows: bool = False,
        max_rows: int | None = None,
        **data: Any,
    ):
        settings = ChatDataConfig(**{"path": "unused.jsonl", "seq_len": 96, **data})
        config = ValidationConfig.model_validate({"path": str(path), "max_rows": max_rows})
        return ValidationRows(
            config, settings, tokenizer, rank=rank, world_size=world_size, pad_rows=pad_rows
        )

    return build


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 1), (2, 3), (4, 2)])
def test_ranks_hold_every_row_once_in_equally_many_micro_batches(
    build: Build, world_size: int, micro_batch_size: int, packing: bool
) -> None:
    options = {"world_size": world_size, "micro_batch_size": micro_batch_size, "packing": packing}
    ranks = [list(build(rank=rank, **options).micro_batches()) for rank in range(world_size)]
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    ids = [i for micro_batches in ranks for micro_batch in micro_batches for i in micro_batch.sample_ids]
    assert sorted(ids) == list(range(13))


def test_every_validation_sees_the_same_rows(build: Build) -> None:
    rows = build()
    first, second = ([micro_batch.tokens.tolist() for micro_batch in rows.micro_batches()] for _ in range(2))
    assert first == second and first


def test_more_ranks_than_rows_get_padding(build: Build) -> None:
    ranks = [
        list(build(rank=rank, world_size=4, max_rows=2, packing=False).micro_batches()) for rank in range(4)
    ]
    assert [[micro_batch.sample_ids for micro_batch in micro_batches] for micro_batches in ranks] == [
        [(0,)], [(1,)], [()], [()]
    ]  # fmt: skip
    assert ranks[3][0].count_trainable("ce") == 0


def test_padded_rows_all_have_the_same_length(build: Build) -> None:
    rows = build(pad_rows=True, micro_batch_size=2)
    assert {len(micro_batch.tokens) for micro_batch in rows.micro_batches()} == {192}


def test_only_the_first_rows_are_used_and_the_summary_counts_them(build: Build) -> None:
    rows = build(max_rows=5)
    assert sum(len(micro_batch.sample_ids) for micro_batch in rows.micro_batches()) == 5
    assert "held_out.jsonl: 5; tokens: " in rows.summary()["validation"]


def test_bad_held_out_rows_are_an_error_of_the_validation_section(
    write_rows: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    config = ValidationConfig.model_validate({"path": str(write_rows([]))})
    with pytest.raises(DataError, match=r"holds no rows; set validation\.path"):
        ValidationRows(
            config, ChatDataConfig.model_validate({"path": "unused.jsonl"}), tokenizer, rank=0, world_size=1
        )
