"""Sizes of a model, and the layouts that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelError
from tests.support.engine import build_sharded, rank_process
from tests.support.ranks import run_ranks
from tests.support.tiny_model import write_tiny_model
from tests.unit.trainer.model.families import write_family
from trainer.model.build import ModelShape, describe
from trainer.parallel.process import Process


def shapes_on_rank(folders: list[str]) -> list[ModelShape]:
    process = rank_process()
    return [describe(build_sharded(folder, process)) for folder in folders]


# Width 32, width of the feed-forward 64, 4 query heads and 2 key heads of 8, 259 tokens.
BLOCK = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 64 + 2 * 32
EMBEDDING = 259 * 32


def test_sizes_are_those_of_the_whole_model_counted_by_hand(tmp_path: Path) -> None:
    folders = [str(write_tiny_model(tmp_path / str(tie), tie=tie)) for tie in (True, False)]
    for of_rank in run_ranks(shapes_on_rank, 2, folders):
        for tie, shape in zip((True, False), of_rank, strict=True):
            total = 2 * BLOCK + 32 + EMBEDDING * (1 if tie else 2)
            assert shape == ModelShape(
                num_parameters=total,
                num_matmul_parameters=2 * BLOCK + 32 + EMBEDDING,
                num_block_parameters=2 * BLOCK,
                is_tied=tie,
                num_layers=2,
                attention_width=32,
                hidden_size=32,
                vocab_size=259,
            )
            assert shape.num_gathered_parameters(reshard_after_forward=False) == total
    deep = ModelShape(1000, 900, 800, True, 8, 32, 32, 100)
    assert deep.num_gathered_parameters(reshard_after_forward=True) == 200 + 2 * 100
    assert deep.num_gathered_parameters(reshard_after_forward=False) == 1000


def test_only_the_experts_that_a_token_visits_count_for_its_work(tmp_path: Path, process: Process) -> None:
    shape = describe(build_sharded(write_family(tmp_path, "qwen3_moe"), process))
    expert = 3 * 32 * 16
    idle = 2 * 2 * expert  # 2 of 4 in each of 2 layers
    embedding = 128 * 32
    assert shape.num_parameters - embedding - shape.num_matmul_parameters == idle


def test_activation_checkpointing_is_on_where_it_is_asked_for(tiny_llama: Path, process: Process) -> None:
    blocks: dict[str, list[Any]] = {
        kind: build_sharded(tiny_llama, process, activation_checkpointing=kind).blocks()
        for kind in ("none", "block")
    }
    assert [block.gradient_checkpointing for block in blocks["block"]] == [True, True]
    assert [block.gradient_checkpointing for block in blocks["none"]] == [False, False]


def test_an_architecture_that_brings_its_own_attention_is_refused_by_varlen(
    tmp_path: Path, process: Process
) -> None:
    settings = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "num_key_value_heads": 4}
    folder = write_family(tmp_path, "codegen", {**settings, "rotary_dim": 8, "n_ctx": 64})
    with pytest.raises(ModelError, match=r"does not take attention from outside; set model.attention"):
        build_sharded(folder, process)
