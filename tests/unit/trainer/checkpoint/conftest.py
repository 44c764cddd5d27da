"""A place for the checkpoints of one test."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.layout import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run that has not begun."""
    return RunFolder(tmp_path / "run")
