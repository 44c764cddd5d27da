"""The data set that comes with the project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
DATA = ROOT / "configs" / "quickstart" / "data"


def phrases(path: Path) -> set[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["messages"][1]["content"].split(": ")[1] for row in rows}


def test_the_committed_files_are_what_the_script_writes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_quickstart_data.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_no_phrase_of_the_held_out_rows_is_trained_on() -> None:
    trained, held_out = phrases(DATA / "train.jsonl"), phrases(DATA / "validation.jsonl")
    assert len(trained) > 200 and len(held_out) > 20
    assert not trained & held_out
