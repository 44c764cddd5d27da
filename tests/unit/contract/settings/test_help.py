"""`--help` and the reference page show every key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from contract.settings.help import help_text
from contract.settings.schema import all_paths, find_keys
from trainer.config import SFTConfig

_ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("width", [60, 100])
def test_help_shows_every_key_with_its_meaning_within_the_width(width: int) -> None:
    text = help_text(SFTConfig, prog="sft", description="Trains.", width=width)
    unwrapped = " ".join(text.split())
    for path in all_paths(SFTConfig):
        keys = find_keys(SFTConfig, path)
        if not keys[0].shape.is_section:
            assert f"--{'.'.join(path).replace('_', '-')} " in unwrapped
        for key in keys:
            assert " ".join(key.description.rstrip(".").split()) in unwrapped
    too_wide = [line for line in text.splitlines() if len(line) > width and " " in line.strip()]
    assert too_wide == []


def test_help_shows_default_choices_and_every_variant() -> None:
    unwrapped = " ".join(help_text(SFTConfig, prog="sft", description="", width=200).split())
    assert '--optimizer.type <adamw | sgd | signsgd | muon> [default: "adamw"]' in unwrapped
    assert "--model.name <text, not empty> [required]" in unwrapped
    assert "--max-steps <integer >= 1, or None> [default: None]" in unwrapped
    for title in ("optimizer, type = muon:", "data, type = fake:", "schedule, type = cosine:"):
        assert title in unwrapped
    assert (
        "--no-ckpt switches it off" in unwrapped and "--wandb or any of its keys switches it on" in unwrapped
    )


@pytest.mark.parametrize("name", ["configuration.md", "configuration-rl.md"])
def test_the_reference_pages_are_up_to_date(name: str) -> None:
    script = _ROOT / "scripts" / "config_reference.py"
    code = f"import runpy, sys; sys.stdout.write(runpy.run_path({str(script)!r})['render']({name!r}))"
    rendered = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, encoding="utf-8"
    ).stdout
    page = (_ROOT / "docs" / name).read_text(encoding="utf-8")
    assert rendered == page, "run `uv run python scripts/config_reference.py`"
