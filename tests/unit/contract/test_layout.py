"""What the run folder tells of its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import RunFolderError
from contract.layout import RunFolder


def test_a_run_is_known_by_its_id(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match="`rl` makes it"):
        folder.read_run_id()
    folder.run_id.write_text("12ab\n")
    assert folder.read_run_id() == "12ab"
