"""The tokenizer of the tiny model, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.tiny_model import write_tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Byte level, ChatML; ends with `<|im_end|>`."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)
