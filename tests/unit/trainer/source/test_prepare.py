"""The fate of every row: tokenised, counted under one reason, or the end of the run with one message."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from contract.errors import DataError
from tests.unit.trainer.source.chats import assistant, chat, short_chats, user
from trainer.config.data import ChatSourceConfig
from trainer.source.prepare import Preparation, Report, prepare_table
from trainer.source.reading import open_rows
from trainer.source.render import ConversationRenderer, Rendered
from trainer.source.table import TableWriter, TokenTable, build_on_disk, open_table

Write = Callable[..., Path]
HOW = Preparation(seq_len=128, on_bad_row="error", on_long_row="skip", max_rows=None)
SIX_ROWS = [
    chat(user("one"), assistant("1")),
    '{"messages": [{"role": "us',
    {"text": "no conversation"},
    chat(user("x"), assistant("")),
    chat({"role": "robot", "content": "x"}, assistant("y")),
    chat(user("two"), assistant("2")),
]
OVERHEAD = len("_user\n_\n_assistant\n_\n")
"""Tokens of a conversation of two turns beside their texts; `_` is a special token."""


def prepare(
    path: Path, tokenizer: PreTrainedTokenizerBase, how: Preparation = HOW, cache_dir: Path | None = None
) -> TokenTable:
    renderer = ConversationRenderer(tokenizer, last_only=False)
    return prepare_table(
        open_rows(ChatSourceConfig.model_validate({"path": str(path)})), renderer, how, cache_dir=cache_dir
    )


def texts(table: TokenTable, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    samples = [table.sample(row) for row in range(len(table))]
    return [tokenizer.decode(sample.tokens[sample.weights["ce"] > 0]) for sample in samples]


def test_bad_rows_stop_the_run_in_one_message_with_file_line_and_reason(
    write_rows: Write, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_rows(SIX_ROWS)
    with pytest.raises(DataError) as caught:
        prepare(path, tokenizer, cache_dir=tmp_path / "cache")
    message = str(caught.value)
    assert f"4 of 6 rows of {path}" in message
    for line, what in ((2, "not valid JSON"), (3, "no `messages`"), (4, "without text"), (5, "'robot'")):
        assert f"{path}:{line}: " in message and what in message.split(f"{path}:{line}: ")[1].split("\n")[0]
    assert "1 bad JSON, 1 no messages, 1 empty assistant text, 1 unknown role" in message
    assert 'data.on_bad_row to "skip"' in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_skipping_trains_on_exactly_the_good_rows_and_counts_the_others_by_reason(
    write_rows: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    how = replace(HOW, on_bad_row="skip")
    table = prepare(write_rows(SIX_ROWS), tokenizer, how)
    assert texts(table, tokenizer) == ["1<|im_end|>", "2<|im_end|>"]
    assert table.sample_ids.tolist() == [0, 5]
    assert Report.from_json(table.report).describe(len(table), how) == (
        "2 of 6 (4 bad skipped: 1 bad JSON, 1 no messages, 1 empty assistant text, 1 unknown role)"
    )


def test_the_list_of_bad_rows_is_short_however_many_there_are(
    write_rows: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError) as caught:
        prepare(write_rows([*short_chats(1), *["{"] * 600]), tokenizer)
    assert "600 of 601 rows" in str(caught.value)
    assert "and 592 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 11


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_data_without_any_good_row_is_an_error(
    write_rows: Write, tokenizer: PreTrainedTokenizerBase, on_bad_row: Any
) -> None:
    how = replace(HOW, on_bad_row=on_bad_row)
    with pytest.raises(DataError, match=r"all 4 rows .* are not conversations"):
        prepare(write_rows(SIX_ROWS[1:5]), tokenizer, how)
    with pytest.raises(DataError, match=r"holds no rows; set data\.path"):
        prepare(write_rows([]), tokenizer, how)


def test_long_rows_are_skipped_cut_or_refused_and_counted(
    write_rows: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    limit = OVERHEAD + 10
    rows = [
        chat(user("q"), assistant("a" * 9)),  # exactly seq_len
        chat(user("q"), assistant("b" * 10)),
        chat(user("q" * 50), assistant("c")),  # nothing to train on is left of it
    ]
    path = write_rows(rows)
    how = replace(HOW, seq_len=limit)
    skipped = prepare(path, tokenizer, how)
    assert texts(skipped, tokenizer) == ["a" * 9 + "<|im_end|>"]
    assert (
        Report.from_json(skipped.report).describe(1, how) == f"1 of 3 (2 longer than {limit} tokens skipped)"
    )

    how = replace(how, on_long_row="truncate")
    cut = prepare(path, tokenizer, how)
    assert texts(cut, tokenizer) == ["a" * 9 + "<|im_end|>", "b" * 10 + "<|im_end|>"]
    assert cut.lengths.tolist() == [limit, limit]
    cut = prepare(path, tokenizer, replace(how, seq_len=limit - 3))
    assert texts(cut, tokenizer) == ["a" * 8, "b" * 8]  # no end token is added where the answer did not end
    assert Report.from_json(cut.report).num_long == 3
    assert Report.from_json(cut.report).num_cut_away == 1

    with pytest.raises(
        DataError, match=rf"2 of 3 rows .* longer than data.seq_len = {limit}:\n  .*:2: {limit + 1} tok"
    ):
        prepare(path, tokenizer, replace(how, on_long_row="error"))


def test_data_with_only_long_rows_is_an_error(write_rows: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"no row .* is left to train on.*Raise data\.seq_len"):
        prepare(write_rows(short_chats(3)), tokenizer, replace(HOW, seq_len=16))


def test_only_the_first_rows_are_used(write_rows: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    table = prepare(write_rows([*short_chats(300), "{"]), tokenizer, replace(HOW, max_rows=300))
    assert table.sample_ids.tolist() == list(range(300))


def test_a_cached_table_equals_the_one_in_memory_and_is_not_built_again(
    write_rows: Write, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path, cache = write_rows(SIX_ROWS), tmp_path / "cache"
    how = replace(HOW, on_bad_row="skip")
    first, in_memory = prepare(path, tokenizer, how, cache), prepare(path, tokenizer, how)
    (folder,) = cache.iterdir()

    def fill_again(writer: TableWriter) -> dict[str, Any]:
        raise AssertionError("the table is there")

    again = build_on_disk(folder, fill_again)
    for table in (first, again):
        assert (table.digest, table.report) == (in_memory.digest, in_memory.report)
        for name in ("tokens", "trainable", "offsets", "sample_ids"):
            assert np.array_equal(getattr(table, name), getattr(in_memory, name))


def test_another_file_template_or_setting_is_another_table(
    write_rows: Write, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path, cache = write_rows(short_chats(4)), tmp_path / "cache"
    prepare(path, tokenizer, HOW, cache)
    prepare(path, tokenizer, replace(HOW, seq_len=64), cache)
    tokenizer.chat_template = str(tokenizer.chat_template).replace("\n", "")
    prepare(path, tokenizer, HOW, cache)
    write_rows(short_chats(5))
    prepare(path, tokenizer, HOW, cache)
    assert len(list(cache.iterdir())) == 4


def test_a_damaged_table_is_built_again(
    write_rows: Write, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path, cache = write_rows(short_chats(4)), tmp_path / "cache"
    whole = prepare(path, tokenizer, HOW, cache)
    digest, tokens = whole.digest, whole.tokens.tolist()
    (folder,) = cache.iterdir()
    for damage in ("tokens.bin", "offsets.npy", "table.json"):
        content = (folder / damage).read_bytes()
        (folder / damage).write_bytes(content[: len(content) // 2])
        assert open_table(folder) is None
        again = prepare(path, tokenizer, HOW, cache)
        assert (again.digest, again.tokens.tolist()) == (digest, tokens)
    assert [item.name for item in cache.iterdir()] == [folder.name]


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(
    write_rows: Write, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cannot be written to .*cache.*XDG_CACHE_HOME"):
        prepare(write_rows(short_chats(2)), tokenizer, HOW, tmp_path / "cache")


def test_builders_that_finish_at_once_all_get_the_table_of_the_first(tmp_path: Path) -> None:
    barrier = threading.Barrier(3)

    def fill(writer: TableWriter) -> dict[str, Any]:
        barrier.wait(timeout=30)  # all three have found no table, and none is done before all have begun
        writer.append(Rendered(np.arange(5, dtype=np.int32), np.ones(5, dtype=np.bool_)), sample_id=0)
        barrier.wait(timeout=30)
        return {}

    with ThreadPoolExecutor(3) as pool:
        tables = list(pool.map(lambda _: build_on_disk(tmp_path / "table", fill), range(3)))
    assert [table.tokens.tolist() for table in tables] == [[0, 1, 2, 3, 4]] * 3
    assert [item.name for item in tmp_path.iterdir()] == ["table"]
