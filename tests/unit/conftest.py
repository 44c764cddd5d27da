"""Tiny models that many tests of the trainer read, written once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine import group_of_one
from tests.support.tiny_model import write_tiny_model
from trainer.parallel.process import Process


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of width 32 with a tied head."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """A group of one for all tests of a module."""
    with group_of_one() as opened:
        yield opened
