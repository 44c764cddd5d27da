"""From a path to rows and the places where they stand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contract.errors import DataError
from trainer.config.data import ChatSourceConfig
from trainer.source.conversation import RowError
from trainer.source.reading import RowFiles, open_rows

ROWS = [
    {"messages": [{"role": "user", "content": "ä"}, {"role": "assistant", "content": text}]} for text in "abc"
]


def read(path: Path | str, **options: Any) -> list[tuple[str, Any]]:
    return [
        (row.place, row.value)
        for row in open_rows(ChatSourceConfig.model_validate({"path": str(path), **options})).rows()
    ]


def test_a_jsonl_row_has_its_line_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + json.dumps(ROWS[0]) + "\n\n  \n" + json.dumps(ROWS[1]), encoding="utf-8")
    assert read(path) == [(f"{path}:1", ROWS[0]), (f"{path}:4", ROWS[1])]


def test_a_line_that_does_not_decode_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [b'{"messages": [', b'{"a": "\xff"}', b"[" * 100_000, json.dumps(ROWS[0]).encode()]
    path.write_bytes(b"\n".join(lines))
    values = [value for _, value in read(path)]
    assert [value.reason for value in values if isinstance(value, RowError)] == [
        "bad JSON",
        "not UTF-8",
        "bad JSON",
    ]
    assert values[3] == ROWS[0]


def test_a_json_file_may_be_an_array_or_lines(tmp_path: Path) -> None:
    array, lines = tmp_path / "array.json", tmp_path / "lines.json"
    array.write_text(json.dumps(ROWS, indent=1))
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [value for _, value in read(array)] == ROWS == [value for _, value in read(lines)]
    assert read(array)[2][0] == f"{array}:row 3"


def test_parquet_rows_equal_the_rows_written_and_lack_the_fields_they_lacked(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    rows = [
        {**ROWS[0], "tools": "[]"},
        {"messages": [*ROWS[1]["messages"], {"role": "tool", "tool_calls": [call]}]},
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"tools": None, **row} for row in rows]), path)
    assert read(path) == [(f"{path}:row 1", rows[0]), (f"{path}:row 2", rows[1])]


def test_a_folder_and_a_glob_read_their_files_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    for name, row in (("b.jsonl", ROWS[1]), ("a.jsonl", ROWS[0]), ("part/c.jsonl", ROWS[2])):
        (tmp_path / name).write_text(json.dumps(row))
    (tmp_path / "notes.txt").write_text("no rows")
    assert [value for _, value in read(tmp_path)] == ROWS
    assert [value for _, value in read(tmp_path / "[ab].jsonl")] == ROWS[:2]
    assert [value for _, value in read(f"{tmp_path}/**/*.jsonl")] == ROWS


def test_a_relative_folder_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_text(json.dumps(ROWS[0]))
    monkeypatch.chdir(tmp_path)
    assert [value for _, value in read("chats")] == ROWS[:1]
    with pytest.raises(DataError, match=r"local path, but data\.split"):
        read("chats", split="test")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "does not exist"),
        ("*.jsonl", "matches no file"),
        ("empty", "contains no file"),
        ("notes", "holds no .jsonl, .json, .parquet file"),
        ("notes/readme.txt", "holds no .jsonl, .json, .parquet file"),
    ],
)
def test_a_path_without_data_is_an_error_that_says_what_is_valid(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("x")
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / name)
    assert "set data.path to a .jsonl" in str(caught.value)


@pytest.mark.parametrize(("name", "content"), [("a.json", b"[1,"), ("a.parquet", b"PAR1xxxxxxxxPAR1")])
def test_a_file_that_is_damaged_as_a_whole_is_an_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        read(tmp_path / name)


class FakeHub:
    """Stands for `datasets.load_dataset`."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.calls = rows, []

    def __call__(self, path: str, subset: str | None, *, split: str, revision: str | None) -> FakeHub:
        self.calls.append((path, subset, split, revision))
        return self

    def __iter__(self):
        return iter(self.rows)


def test_a_hub_data_set_is_asked_for_with_subset_split_and_revision() -> None:
    hub = FakeHub([{**ROWS[0], "tools": None}])
    config = ChatSourceConfig(path="team/chats", subset="en", split="train[:1%]", revision="v2")
    rows = list(open_rows(config, load_dataset=hub).rows())
    assert hub.calls == [("team/chats", "en", "train[:1%]", "v2")]
    assert [(row.place, row.value) for row in rows] == [("team/chats:en:train[:1%]:v2:row 1", ROWS[0])]


def test_a_hub_data_set_that_cannot_be_loaded_is_an_error_that_names_it() -> None:
    def load(*arguments: Any, **options: Any) -> Any:
        raise ConnectionError("no route")

    with pytest.raises(
        DataError, match=r"'team/chats'.*cannot be loaded from the Hub: ConnectionError: no route"
    ):
        open_rows(ChatSourceConfig.model_validate({"path": "team/chats"}), load_dataset=load)


def test_the_fingerprint_follows_the_content(write_rows: Callable[..., Path]) -> None:
    path = write_rows(ROWS[:1])
    before = RowFiles((path,)).fingerprint()
    assert RowFiles((path,)).fingerprint() == before
    write_rows(ROWS[:2])
    assert RowFiles((path,)).fingerprint() != before
