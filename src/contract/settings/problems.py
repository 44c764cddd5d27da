"""What is wrong with a configuration, collected over one whole reading and told in one message."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from contract.errors import ConfigError
from contract.settings.schema import Key, KeyPath, all_paths, child_sections, find_keys, keys_of

COMMAND_LINE = "command line"

_KEY_IN_TEXT = re.compile(r"[a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)*")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong (`text`) with which key (empty: the whole), and where it was set (None: nowhere)."""

    path: KeyPath
    origin: str | None
    text: str

    def line(self) -> str:
        """The problem as one line of a message."""
        where = f" ({self.origin})" if self.origin else ""
        name = ".".join(self.path)
        return f"{name}{where}: {self.text}" if name else f"{self.text}{where}"


def raise_problems(problems: Iterable[Problem], prog: str) -> None:
    """Raise all of `problems` as one ConfigError; returns if there is none."""
    lines = list(dict.fromkeys(problem.line() for problem in problems))
    if not lines:
        return
    title = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    body = "\n".join(f"  - {line}" for line in lines)
    raise ConfigError(
        f"{title} in the configuration of {prog}; nothing was started:\n{body}\n"
        f"`{prog} --help` shows every key, its type and its meaning."
    )


def show(value: Any) -> str:
    """`value` as a person would write it in TOML or on the command line, cut to a readable length."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def suggest(root: type[BaseModel], path: KeyPath, *, flag: bool = False) -> str:
    """`; did you mean ...?` for an unknown key, or the valid keys of its section where nothing is near."""
    known = sorted({".".join(candidate) for candidate in all_paths(root)})
    wanted = ".".join(path)
    same_name = [name for name in known if "." in name and name.rsplit(".", 1)[1] == path[-1]]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.75) or same_name[:3]
    if not near:
        siblings = sorted(
            {name.rsplit(".", 1)[-1] for name in known if name.rpartition(".")[0] == ".".join(path[:-1])}
        )
        close = difflib.get_close_matches(path[-1], siblings, n=1)
        near = [".".join((*path[:-1], name)) for name in close] or difflib.get_close_matches(
            wanted, known, n=1
        )
        if not near:
            section = f"section {'.'.join(path[:-1])}" if len(path) > 1 and siblings else "top level"
            names = siblings or sorted(keys_of(root))
            return f"; the keys of the {section} are {', '.join(names)}"
    if flag:
        near = ["--" + name.replace("_", "-") for name in near]
    return f"; did you mean {' or '.join(near)}?"


def key_path(root: type[BaseModel], location: tuple[int | str, ...]) -> KeyPath:
    """The key path of pydantic's `location`, which also names union variants and list indices."""
    path: list[str] = []
    sections = [root]
    expected_tags: list[str] = []
    for part in location:
        if isinstance(part, int):
            break
        if part in expected_tags:
            sections = [child for child in sections if part in _tags(child, expected_tags)]
            expected_tags = []
            continue
        path.append(part)
        key = next((keys_of(section)[part] for section in sections if part in keys_of(section)), None)
        if key is None or not key.shape.is_section:
            break
        expected_tags = [tag for tag, _ in key.shape.variants]
        sections = child_sections(key.shape)
    return tuple(path)


def _tags(section: type[BaseModel], tags: list[str]) -> set[str]:
    """Those of `tags` that select `section`."""
    return {
        tag
        for key in keys_of(section).values()
        for tag in key.shape.choices
        if isinstance(tag, str) and tag in tags
    }


def from_validation(
    root: type[BaseModel], error: ValidationError, values: Mapping[str, Any], origins: Mapping[KeyPath, str]
) -> list[Problem]:
    """Pydantic's errors as problems: key path, where it was set, what was found, what is valid."""
    problems = []
    for item in error.errors(include_url=False):
        location, kind = item["loc"], item["type"]
        path = key_path(root, location)
        keys = find_keys(root, path) if path else []
        origin = origins.get(path)
        index = next((part for part in location if isinstance(part, int)), None)
        if kind == "value_error":
            # A check of a whole section names the keys it looked at; say where each of them was set.
            text = str(item.get("ctx", {}).get("error", item["msg"]))
            whole = not keys or keys[0].shape.is_section
            problems.append(Problem(() if whole else path, None, text + _set_at(text, path, origins)))
        elif index is not None and location[-1] != index:  # inside a table of a list
            name = location[-1]
            text = {"extra_forbidden": f"unknown key {name!r}", "missing": f"{name} is not set"}.get(
                kind, f"{name}: found {show(item['input'])}; {item['msg']}"
            )
            problems.append(Problem(path, origin, f"item {index}: {text}"))
        elif kind == "missing":
            problems.append(Problem(path, None, _missing(path, keys)))
        elif kind == "extra_forbidden":
            problems.append(Problem(path, origin, _wrong_variant(root, path, values)))
        else:
            valid = keys[0].shape.describe() if keys else item["msg"]
            place = "" if index is None else f" (item {index})"
            hint = _hint(item["input"], keys)
            problems.append(
                Problem(path, origin, f"found {show(item['input'])}{place}, valid is {valid}{hint}")
            )
    return problems


def _set_at(text: str, path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    """Where the keys that `text` names were set."""
    found: dict[str, str] = {}
    for match in _KEY_IN_TEXT.finditer(text):
        candidate = tuple(match.group().split("."))
        for place in (candidate, (*path, *candidate)):
            if place in origins:
                found[".".join(place)] = origins[place]
    return f" [{', '.join(f'{name}: {origin}' for name, origin in found.items())}]" if found else ""


def _missing(path: KeyPath, keys: list[Key]) -> str:
    name = ".".join(path)
    meaning = f" It means: {keys[0].description}" if keys and keys[0].description else ""
    flag = "--" + name.replace("_", "-")
    return f"not set, and it has no default; set it in a file or with {flag}.{meaning}"


def _wrong_variant(root: type[BaseModel], path: KeyPath, values: Mapping[str, Any]) -> str:
    """The text for a key that belongs to another variant of its union."""
    parent = find_keys(root, path[:-1])[0].shape
    section: Any = values
    for name in path[:-1]:
        section = section[name]
    tag = section.get(parent.discriminator)
    owners = [other for other, cls in parent.variants if path[-1] in keys_of(cls)]
    selector = ".".join((*path[:-1], parent.discriminator or ""))
    belongs = " and ".join(map(repr, owners))
    return f"not a key of {selector} = {tag!r}; it belongs to {belongs}; remove it or set {selector}"


def _hint(value: Any, keys: list[Key]) -> str:
    """Advice for the commonest slips."""
    if not keys or not isinstance(value, str):
        return ""
    shape = keys[0].shape
    if shape.kind in ("int", "float", "bool"):
        return (
            "; write it without quotes" if re.fullmatch(r"true|false|[-+]?[\d._]+(e[-+]?\d+)?", value) else ""
        )
    near = difflib.get_close_matches(value, [str(choice) for choice in shape.choices], n=1)
    return f"; did you mean {near[0]}?" if near else ""
