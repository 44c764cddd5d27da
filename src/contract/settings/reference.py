"""The reference page of a configuration class, as Markdown."""

from __future__ import annotations

from pydantic import BaseModel

from contract.settings.help import Block, blocks, default_text
from contract.settings.schema import Key


def reference_markdown(cls: type[BaseModel], *, title: str = "Configuration") -> str:
    """Every key of `cls`: name, type, default and meaning, one table per section."""
    lines = [f"# {title}", "", *_INTRODUCTION.strip().splitlines()]
    for block in blocks(cls):
        lines += ["", f"## {_heading(block)}", "", *_paragraphs(block)]
        if block.keys:
            lines += ["", "| key | type | default | meaning |", "|---|---|---|---|"]
            lines += [_row(block, key) for key in block.keys]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """
This page is written by `scripts/config_reference.py` from the configuration classes; a test holds it up to
date.

Every key is a TOML key (`[ckpt]`, `keep_last = 3`) and a flag (`--ckpt.keep-last 3`). Files are given as
`@ file.toml`; several are merged from left to right, and flags win over files. Types are not converted: `"3"`
is not a number. Where `None` is valid it is written `None` on the command line and `"None"` in TOML. An
unknown key is an error.

A section that is off by default is switched on by naming it (`--wandb`, or `[wandb]` in a file) or any of its
keys; one that is on is switched off with `--no-ckpt`, or `ckpt = "None"` in a file. Where a section has
several kinds, choosing another kind drops what earlier files set for the old one alone, and says so.
"""


def _heading(block: Block) -> str:
    return (
        block.title
        if not block.path
        else block.title.replace(".".join(block.path), f"`{'.'.join(block.path)}`", 1)
    )


def _paragraphs(block: Block) -> list[str]:
    return [
        part.replace("--", "\\--") if "`" not in part else part
        for part in (block.meaning, block.switch)
        if part
    ]


def _row(block: Block, key: Key) -> str:
    name = ".".join((*block.path, key.name))
    cells = [
        f"`{name}`",
        key.shape.describe(),
        f"`{default_text(key)}`" if not key.required else "required",
        key.description,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
