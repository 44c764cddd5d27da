"""Tiny models, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("engine") / "llama", hidden=64, seed=1)


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape, with other weights."""
    return write_tiny_model(tmp_path_factory.mktemp("engine") / "other", hidden=64, seed=2)
