"""Chat data as a source: what reaches an update, the position as state, and the identity of the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from contract.batch import MicroBatch, StepBatch
from contract.errors import DataError
from tests.unit.trainer.source.chats import short_chats
from trainer.config.data import ChatDataConfig
from trainer.source.base import Source
from trainer.source.dataset import ChatSource

NUM_ROWS = 23


@pytest.fixture
def build(write_rows: Callable[..., Path], tokenizer: PreTrainedTokenizerBase) -> Callable[..., ChatSource]:
    path = write_rows(short_chats(NUM_ROWS))

    def build(*, config: dict[str, Any] | None = None, **options: Any) -> ChatSource:
        settings = {"path": str(path), "seq_len": 96, "batch_size": 4, **(config or {})}
        place = {"rank": 0, "world_size": 1, "seed": 0, "max_epochs": None, **options}
        return ChatSource(ChatDataConfig.model_validate(settings), tokenizer, **place)

    return build


def take(source: Source, steps: int) -> list[StepBatch]:
    batches = [source.next_step() for _ in range(steps)]
    assert all(isinstance(batch, StepBatch) for batch in batches)
    return [batch for batch in batches if isinstance(batch, StepBatch)]


def sample_ids(batches: Sequence[StepBatch]) -> list[list[tuple[int, ...]]]:
    return [[micro_batch.sample_ids for micro_batch in batch.micro_batches] for batch in batches]


def documents(micro_batch: MicroBatch) -> list[list[int]]:
    bounds = micro_batch.cu_seqlens[: len(micro_batch.sample_ids) + 1].tolist()
    return [micro_batch.tokens[start:end].tolist() for start, end in pairwise(bounds)]


def test_an_epoch_holds_every_conversation_once_as_the_tokenizer_renders_it(
    build: Callable[..., ChatSource], tokenizer: PreTrainedTokenizerBase
) -> None:
    source = build(max_epochs=1)
    found: dict[int, list[int]] = {}
    num_samples = 0
    while (batch := source.next_step()) is not None:
        num_samples += batch.num_samples
        for micro_batch in batch.micro_batches:
            found.update(zip(micro_batch.sample_ids, documents(micro_batch), strict=True))
    rendered = [
        tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in short_chats(NUM_ROWS)
    ]
    assert found == dict(enumerate(rendered))
    assert num_samples == NUM_ROWS


def test_the_loss_weight_stands_where_an_assistant_token_is_predicted(
    build: Callable[..., ChatSource], tokenizer: PreTrainedTokenizerBase
) -> None:
    (batch,) = take(build(config={"shuffle": False}), 1)
    for micro_batch in batch.micro_batches:
        assert set(micro_batch.weights["ce"].tolist()) == {0.0, 1.0}
        text = tokenizer.decode(micro_batch.targets[micro_batch.weights["ce"] == 1])
        assert text == "".join(f"row {sample_id}<|im_end|>" for sample_id in micro_batch.sample_ids)


def test_without_packing_a_row_is_one_conversation_and_without_shuffling_in_file_order(
    build: Callable[..., ChatSource],
) -> None:
    batches = take(build(config={"packing": False, "shuffle": False}), 6)
    flat = [
        sample_id
        for batch in batches
        for micro_batch in batch.micro_batches
        for sample_id in micro_batch.sample_ids
    ]
    assert flat == [*range(NUM_ROWS), 0]


def test_packing_puts_conversations_together_and_keeps_rows_within_seq_len(
    build: Callable[..., ChatSource],
) -> None:
    batches = take(build(), 4)
    micro_batches = [micro_batch for batch in batches for micro_batch in batch.micro_batches]
    assert max(len(micro_batch.tokens) for micro_batch in micro_batches) <= 96
    assert max(len(micro_batch.sample_ids) for micro_batch in micro_batches) >= 2


@pytest.mark.parametrize("packing", [True, False])
def test_two_resumes_in_a_row_equal_the_uninterrupted_run(
    build: Callable[..., ChatSource], packing: bool
) -> None:
    config = {"packing": packing}
    whole = sample_ids(take(build(config=config), 9))
    first = build(config=config)
    found = sample_ids(take(first, 3))
    for _ in range(2):
        state = json.loads(json.dumps(first.state_dict()))
        first = build(config=config)
        first.load_state_dict(state)
        found += sample_ids(take(first, 3))
    assert found == whole


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_another_world_size_continues_with_the_same_rows(
    build: Callable[..., ChatSource], before: int, after: int
) -> None:
    def rows(sources: list[ChatSource], steps: int) -> list[list[int]]:
        taken = []
        for _ in range(steps):
            batches = [take(source, 1)[0] for source in sources]
            assert len({len(batch.micro_batches) for batch in batches}) == 1
            assert len({batch.num_samples for batch in batches}) == 1
            ids = [
                i for batch in batches for micro_batch in batch.micro_batches for i in micro_batch.sample_ids
            ]
            assert len(ids) == batches[0].num_samples
            taken.append(sorted(ids))
        return taken

    expected = rows([build()], 6)
    sources = [build(rank=rank, world_size=before) for rank in range(before)]
    found = rows(sources, 3)
    states = [source.state_dict() for source in sources]
    assert all(state == states[0] for state in states)
    sources = [build(rank=rank, world_size=after) for rank in range(after)]
    for source in sources:
        source.load_state_dict(states[0])
    assert found + rows(sources, 3) == expected


def test_the_short_last_update_gives_every_rank_equally_many_micro_batches(
    build: Callable[..., ChatSource],
) -> None:
    config = {"packing": False, "shuffle": False, "batch_size": 8}
    sources = [build(rank=rank, world_size=4, max_epochs=1, config=config) for rank in range(4)]
    assert {source.steps_left for source in sources} == {3}
    last = [take(source, 3)[-1] for source in sources]  # 23 rows: the last update has 7
    assert [len(batch.micro_batches) for batch in last] == [2] * 4
    assert [batch.micro_batches[1].sample_ids for batch in last] == [(20,), (21,), (22,), ()]
    padding = last[3].micro_batches[1]
    assert padding.num_tokens == 0 and padding.weights["ce"].tolist() == [0.0]
    assert {batch.num_samples for batch in last} == {7}
    assert [source.next_step() for source in sources] == [None] * 4


def test_padded_rows_all_have_the_same_length(build: Callable[..., ChatSource]) -> None:
    source = build(pad_rows=True, max_epochs=1, config={"micro_batch_size": 3})
    lengths = set()
    while (batch := source.next_step()) is not None:
        lengths |= {len(micro_batch.tokens) for micro_batch in batch.micro_batches}
    assert lengths == {3 * 96}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"config": {"seq_len": 128}}, "data.seq_len was 96, is 128"),
        ({"config": {"packing": False}}, "data.packing was True, is False"),
        ({"config": {"shuffle": False}}, "data.shuffle was True, is False"),
        ({"config": {"max_rows": 22}}, "rows was "),
        ({"config": {"loss_on": "last_assistant"}}, "chat template and tokenizer was "),
    ],
)
def test_the_position_in_other_data_is_refused_and_the_difference_named(
    build: Callable[..., ChatSource], change: dict[str, Any], named: str
) -> None:
    state = build().state_dict()
    with pytest.raises(DataError) as caught:
        build(**change).load_state_dict(state)
    assert named in str(caught.value)
    assert "resume.skip_data" in str(caught.value)


def test_the_position_in_the_same_data_at_another_place_is_accepted(
    build: Callable[..., ChatSource], tmp_path: Path
) -> None:
    source = build()
    take(source, 2)
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    moved = build(config={"path": str(tmp_path / "moved.jsonl"), "batch_size": 2})
    moved.load_state_dict(source.state_dict())
    assert moved.state_dict() == source.state_dict()


def test_the_position_of_another_kind_of_data_is_refused(build: Callable[..., ChatSource]) -> None:
    with pytest.raises(DataError, match="not one of this kind of data"):
        build().load_state_dict({"cursor": 3})


def test_the_summary_says_how_many_rows_tokens_and_what_was_dropped(
    build: Callable[..., ChatSource], write_rows: Callable[..., Path]
) -> None:
    path = write_rows([*short_chats(3), "{"], "bad.jsonl")
    summary = build(config={"path": str(path), "on_bad_row": "skip"}).summary()
    assert summary["data"] == str(path)
    assert summary["conversations"] == "3 of 4 (1 bad skipped: 1 bad JSON)"
    # 21 tokens frame a conversation; the texts have 1 + 5, 2 + 5 and 3 + 5, of which 5 and the end token are
    # trained.
    assert summary["tokens"] == "84 (21% with loss)"
    assert summary["rows per epoch"] == "1 of at most 96 tokens, 88% full"
