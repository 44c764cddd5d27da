"""The command line: `@ file.toml`, flags, and how a flag's words become a value of the declared type.

    --key value   --key=value   --flag   --no-flag   --flag true|false   --key None   --list a b   --table
    '{"a": 1}' --section (switch on)   --no-section (switch off)   --section.key value

Kebab-case and snake_case name the same key. A flag given twice takes the later value, and a notice says so; a
list given twice is joined. The order of flags and files does not matter: flags win over files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from contract.settings import text
from contract.settings.problems import COMMAND_LINE, Problem, show, suggest
from contract.settings.schema import Key, KeyPath, Shape, find_keys

_NUMBER = re.compile(r"-(\d|\.\d|inf|nan)")
_SWITCHES = {"help", "version", "dry_run"}


@dataclass(slots=True)
class CommandLine:
    """What a command line says.

    Attributes:
        files: configuration files in the order given.
        values: values of flags, nested.
        switches: those of `help`, `version`, `dry_run` that were given.
        notices: what a caller should log.
        problems: what cannot be understood.
    """

    files: list[Path] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse_command_line(root: type[BaseModel], argv: Sequence[str]) -> CommandLine:
    """Read `argv` (without the program's name) for the configuration class `root`. Never raises; see
    `problems`.
    """
    return _Parser(root, argv).parse()


class _Parser:
    """One pass over the words, left to right."""

    def __init__(self, root: type[BaseModel], argv: Sequence[str]) -> None:
        self._root = root
        self._words = list(argv)
        self._position = 0
        self._result = CommandLine()
        self._given: dict[KeyPath, Any] = {}

    def parse(self) -> CommandLine:
        while self._position < len(self._words):
            word = self._words[self._position]
            self._position += 1
            if word.startswith("@"):
                self._file(word)
            elif word == "-h":
                self._result.switches.add("help")
            elif word.startswith("--") and len(word) > 2:
                self._flag(word)
            else:
                self._problem(
                    (),
                    f"unexpected argument {word!r}: a file is given as `@ {word}`, "
                    "a setting as `--key value`",
                )
        return self._result

    def _file(self, word: str) -> None:
        if word == "@":
            if self._position == len(self._words) or self._words[self._position].startswith("--"):
                self._problem((), "`@` is not followed by a file: write `@ configs/FILE.toml`")
                return
            name = self._words[self._position]
            self._position += 1
        else:
            name = word[1:]
        self._result.files.append(Path(name).expanduser())

    def _flag(self, word: str) -> None:
        name, equals, value = word[2:].partition("=")
        inline = value if equals else None
        path = tuple(part.replace("-", "_") for part in name.split("."))
        if len(path) == 1 and path[0] in _SWITCHES and inline is None:
            self._result.switches.add(path[0])
            return
        keys = find_keys(self._root, path)
        if keys:
            self._set(path, keys, inline)
            return
        negated = _without_no(path)
        keys = find_keys(self._root, negated) if negated else []
        if (
            negated
            and keys
            and (keys[0].shape.kind == "bool" or (keys[0].shape.is_section and keys[0].shape.optional))
        ):
            if inline is not None:
                self._problem(negated, f"`--{name}` takes no value")
                return
            self._assign(negated, False if keys[0].shape.kind == "bool" else None)
            return
        self._take_words()
        if negated and keys:
            flag = "--" + ".".join(negated).replace("_", "-")
            how = f"`{flag} None`" if keys[0].shape.optional else f"`{flag} VALUE`"
            self._problem(
                path, f"only a flag or an optional section can be switched off with no-; write {how}"
            )
            return
        self._problem(path, f"unknown flag `--{name}`{suggest(self._root, path, flag=True)}")

    def _set(self, path: KeyPath, keys: list[Key], inline: str | None) -> None:
        """Read the words of a known flag and store their value."""
        errors = []
        start = self._position
        for (
            key
        ) in keys:  # variants of a union may declare the same key with another type: the first that fits
            self._position = start
            try:
                value = self._value(key, inline)
            except text.TextError as error:
                errors.append(str(error))
                continue
            self._assign(path, value, joins=key.shape.kind == "list")
            return
        choices = tuple(choice for key in keys for choice in key.shape.choices)
        if choices:
            given = inline if inline is not None else self._words[self._position - 1]
            errors = [f"found {given!r}, valid is {Shape('choice', choices=choices).describe()}"]
        self._problem(path, errors[0])

    def _value(self, key: Key, inline: str | None) -> Any:
        shape = key.shape
        if shape.is_section or shape.kind == "dict":
            return self._table(key, inline)
        if shape.kind == "bool":
            if inline is None:
                words = ("true", "false", "True", "False", *((text.NONE,) if shape.optional else ()))
                inline = self._take_words(1)[0] if self._peek() in words else "true"
            return text.parse(inline, shape)
        words_given = (
            [inline] if inline is not None else self._take_words(None if shape.kind == "list" else 1)
        )
        if not words_given:
            extra = " (`'[]'` for an empty list)" if shape.kind == "list" else ""
            raise text.TextError(f"the flag needs a value, valid is {shape.describe()}{extra}")
        return (
            text.parse_list(words_given, shape) if shape.kind == "list" else text.parse(words_given[0], shape)
        )

    def _table(self, key: Key, inline: str | None) -> Any:
        """The value of a section's own flag: a JSON object, None, or nothing (switch it on)."""
        shape = key.shape
        if inline is None:
            word = self._peek() or ""
            if shape.kind == "dict" or word.startswith("{") or (word == text.NONE and shape.optional):
                words = self._take_words(1)
                if not words:
                    raise text.TextError("the flag needs a value, valid is a JSON object")
                inline = words[0]
            elif shape.optional:
                return {}
            else:
                name = key.name.replace("_", "-")
                raise text.TextError(
                    f"is a section that is always on; set one of its keys, as in `--{name}.KEY VALUE`"
                )
        if inline == text.NONE and shape.optional:
            return None
        return text.parse_table(inline)

    def _peek(self) -> str | None:
        return self._words[self._position] if self._position < len(self._words) else None

    def _take_words(self, most: int | None = None) -> list[str]:
        """The following words that are no flag and no `@`, at most `most`. A negative number is a value."""
        taken: list[str] = []
        while (word := self._peek()) is not None and (most is None or len(taken) < most):
            if (
                word.startswith(("--", "@"))
                or word == "-h"
                or (word.startswith("-") and not _NUMBER.match(word))
            ):
                break
            taken.append(word)
            self._position += 1
        return taken

    def _assign(self, path: KeyPath, value: Any, *, joins: bool = False) -> None:
        """Store a value, joining lists and tables, and refusing what contradicts an earlier flag."""
        target: dict[str, Any] = self._result.values
        for depth, name in enumerate(path[:-1], start=1):
            if name in target and target[name] is None:
                self._contradiction(path[:depth], path)
                return
            target = target.setdefault(name, {})
        name, flag = path[-1], "--" + ".".join(path).replace("_", "-")
        old = target.get(name)
        if isinstance(value, dict):
            if name in target and old is None:
                self._contradiction(path, path)
                return
            _update(target.setdefault(name, {}), value)
            return
        if value is None and isinstance(old, dict):
            self._contradiction(path, path)
            return
        if joins and isinstance(old, list) and isinstance(value, list):
            target[name] = old + value
            return
        if path in self._given and self._given[path] != value:
            self._result.notices.append(
                f"{flag} is given more than once ({show(self._given[path])}, then {show(value)}); "
                "the last one counts"
            )
        self._given[path] = value
        target[name] = value

    def _contradiction(self, section: KeyPath, path: KeyPath) -> None:
        name = ".".join(section).replace("_", "-")
        self._problem(
            path, f"the command line switches the section {name} both off (`--no-{name}`) and on; keep one"
        )

    def _problem(self, path: KeyPath, message: str) -> None:
        self._result.problems.append(Problem(path, COMMAND_LINE, message))


def _update(target: dict[str, Any], value: dict[str, Any]) -> None:
    """Deep update: tables are joined, everything else is replaced."""
    for name, item in value.items():
        if isinstance(item, dict) and isinstance(target.get(name), dict):
            _update(target[name], item)
        else:
            target[name] = item


def _without_no(path: KeyPath) -> KeyPath | None:
    """`no_a.b` and `a.no_b` as `a.b`; None if there is no `no_`."""
    if path[0].startswith("no_"):
        return (path[0][3:], *path[1:])
    if path[-1].startswith("no_"):
        return (*path[:-1], path[-1][3:])
    return None
