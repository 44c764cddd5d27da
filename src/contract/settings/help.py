"""`--help`: every key of every section, with meaning, valid values and default, as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from contract.settings.schema import Key, KeyPath, child_sections, keys_of
from contract.settings.text import NONE

_USAGE = """\
usage: {prog} [@ FILE.toml ...] [--key value ...] [--dry-run]

{description}

A configuration file is given as `@ file.toml`. Several are merged left to right: a later one replaces \
single keys of an earlier one. Flags win over files. Every key below is a flag and a TOML key: \
`--ckpt.keep-last 3` on the command line is `keep_last = 3` under `[ckpt]` in a file.

  --key value, --key=value   set a key; kebab-case and snake_case are the same
  --flag, --no-flag          true, false
  --key None                 unset an optional key (in TOML: key = "None")
  --list a b, --list '[]'    a list; giving the flag again adds to it
  --section '{{"key": 1}}'     several keys as JSON
  --section, --no-section    switch an optional section on, off

  --dry-run                  check everything, write the resolved configuration, start nothing
  --version                  print the version
  --help, -h                 print this text"""


@dataclass(frozen=True, slots=True)
class Block:
    """One section, or what one variant of a union adds, as help and reference show it.

    Attributes:
        path: key path of the section; empty at the top level.
        title: name, with the variant where there are several.
        meaning: what the section or variant is.
        switch: for an optional section, whether it is on by default and how to change that; else empty.
        keys: its keys; sections inside it have blocks of their own.
    """

    path: KeyPath
    title: str
    meaning: str
    switch: str
    keys: list[Key]


def blocks(root: type[BaseModel], path: KeyPath = ()) -> Iterator[Block]:
    """All blocks of `root`, in the order of declaration."""
    keys = keys_of(root)
    if not path:
        yield Block(
            (), "top level", _summary(root), "", [key for key in keys.values() if not key.shape.is_section]
        )
    for name, key in keys.items():
        if key.shape.is_section:
            yield from _section_blocks((*path, name), key)


def _section_blocks(path: KeyPath, key: Key) -> Iterator[Block]:
    title, sections = ".".join(path), child_sections(key.shape)
    meaning = _sentences(key.description, _summary(sections[0]) if key.shape.kind == "section" else "")
    if key.shape.kind == "section":
        own = keys_of(sections[0])
        yield Block(
            path,
            title,
            meaning,
            _switch(path, key),
            [item for item in own.values() if not item.shape.is_section],
        )
        yield from blocks(sections[0], path)
        return
    selector = key.shape.discriminator or ""
    shared = [
        item
        for name, item in keys_of(sections[0]).items()
        if name != selector and all(_same(item, keys_of(other).get(name)) for other in sections[1:])
    ]
    yield Block(path, title, meaning, _switch(path, key), [_selector(key), *shared])
    shared_names = {item.name for item in shared}
    for tag, section in key.shape.variants:
        own = [
            item for name, item in keys_of(section).items() if name not in shared_names and name != selector
        ]
        yield Block(path, f"{title}, {selector} = {tag}", _summary(section), "", own)


def _selector(key: Key) -> Key:
    """The discriminator of a union as one key with all its choices."""
    from pydantic.fields import FieldInfo

    from contract.settings.schema import Shape

    name = key.shape.discriminator or ""
    tags = tuple(tag for tag, _ in key.shape.variants)
    info = FieldInfo(
        annotation=str, default=key.default_tag(), description="Selects the kind; each has keys of its own."
    )
    return Key(name, Shape("choice", choices=tags), info)


def _same(left: Key, right: Key | None) -> bool:
    if right is None or left.shape != right.shape or left.required != right.required:
        return False
    return left.description == right.description and (left.required or left.default == right.default)


def _switch(path: KeyPath, key: Key) -> str:
    if not key.shape.optional:
        return ""
    name = ".".join(path).replace("_", "-")
    on = not key.required and key.default is not None
    return (
        f"On by default; --no-{name} switches it off."
        if on
        else f"Off by default; --{name} or any of its keys switches it on."
    )


def default_text(key: Key) -> str:
    """The default as it would be written in TOML, or `required`."""
    return "required" if key.required else _toml(key.default)


def _toml(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return (
        f'"{value}"'
        if isinstance(value, str | Path)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def help_text(root: type[BaseModel], *, prog: str, description: str, width: int | None = None) -> str:
    """The whole help.

    Args:
        width: columns; None is the terminal's width, between 60 and 120.
    """
    columns = width or min(max(shutil.get_terminal_size().columns, 60), 120)
    lines: list[str] = []
    for line in _USAGE.format(prog=prog, description=description).splitlines():
        indent = " " * 29 if line.startswith("  -") else ""
        lines += textwrap.wrap(line, columns, subsequent_indent=indent) or [""]
    for block in blocks(root):
        lines += [
            "",
            *textwrap.wrap(
                f"{block.title}: {_sentences(block.meaning, block.switch)}", columns, subsequent_indent="  "
            ),
        ]
        for key in block.keys:
            lines += _key_lines(block.path, key, columns)
    return "\n".join(lines)


def _key_lines(path: KeyPath, key: Key, columns: int) -> list[str]:
    flag = "  --" + ".".join((*path, key.name)).replace("_", "-")
    facts = f"<{key.shape.describe()}> [{'required' if key.required else f'default: {default_text(key)}'}]"
    head = [f"{flag} {facts}"] if len(flag) + len(facts) < columns else [flag, *_indent(facts, columns)]
    return [*head, *_indent(key.description, columns)]


def _indent(text: str, columns: int) -> list[str]:
    return textwrap.wrap(
        text, columns, initial_indent=" " * 8, subsequent_indent=" " * 8, break_long_words=False
    )


def _summary(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _sentences(*parts: str) -> str:
    """Non-empty parts as one text; a part that the next one only says again is left out."""
    said = [part for part in parts if part]
    return " ".join(
        part
        for part, later in zip(said, [*said[1:], ""], strict=True)
        if not later.startswith(part.rstrip("."))
    )
