"""Reading a configuration: files, flags, merge, validation; one message for everything that is wrong.

No environment variable decides anything. Later files win over earlier ones, flags over files. `None` is
written as `None` on the command line and as the string "None" in TOML, for keys where None is valid.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from contract.settings.flags import CommandLine, parse_command_line
from contract.settings.merge import Merger
from contract.settings.problems import Problem, from_validation, raise_problems
from contract.settings.schema import KeyPath, find_keys
from contract.settings.sources import flag_layer, read_toml

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """A configuration that was read.

    Attributes:
        settings: the valid configuration.
        notices: what the user should be told: dropped keys of another variant, flags given twice.
        dry_run: whether `--dry-run` was given.
        sources: where each key that was set was set, e.g. {"max_steps": "configs/a.toml, line 3"}.
    """

    settings: S
    notices: list[str]
    dry_run: bool
    sources: Mapping[str, str]


def load_settings(cls: type[S], argv: Sequence[str], *, prog: str, description: str) -> Loaded[S]:
    """Read a configuration of class `cls` from a command line.

    Args:
        argv: the words after the program's name.
        prog: the program's name, for messages.
        description: what the program does, for `--help`.

    Raises:
        ConfigError: a file, a key or a value is wrong; the message lists everything found.
        SystemExit: with code 0, after `--help` or `--version` was printed.
    """
    command_line = parse_command_line(cls, argv)
    if "help" in command_line.switches:
        from contract.settings.help import help_text

        print(help_text(cls, prog=prog, description=description))
        raise SystemExit(0)
    if "version" in command_line.switches:
        from importlib.metadata import version

        print(f"{prog} (tailrace {version('tailrace')}, Python {sys.version.split()[0]})")
        raise SystemExit(0)
    merger, problems = _merge(cls, command_line)
    if not argv:
        problems.append(
            Problem((), None, f"no configuration was given: try `{prog} @ configs/quickstart/sft.toml`")
        )
    settings, found = _validate(cls, merger, problems)
    raise_problems([*problems, *found], prog)
    assert settings is not None
    sources = {".".join(path): origin for path, origin in merger.origins.items()}
    return Loaded(
        settings, command_line.notices + merger.notices, "dry_run" in command_line.switches, sources
    )


def load_file(cls: type[S], path: Path) -> S:
    """Read one TOML file, e.g. a resolved configuration, without a command line.

    Raises:
        ConfigError: the file or one of its values is wrong.
    """
    return load_settings(cls, [f"@{path}"], prog=path.name, description="").settings


def with_values(settings: S, values: Mapping[str, Any], *, origin: str, prog: str) -> S:
    """`settings` with some keys changed and everything checked again.

    Args:
        values: new values by dotted key.
        origin: why the keys have these values, for messages.

    Raises:
        ConfigError: the new values contradict others.
    """
    data = settings.model_dump()
    origins: dict[KeyPath, str] = {}
    for name, value in values.items():
        *parents, last = path = name.split(".")
        table = data
        for parent in parents:
            table = table[parent]
        table[last] = value
        origins[tuple(path)] = origin
    try:
        return type(settings).model_validate(data)
    except ValidationError as error:
        raise_problems(from_validation(type(settings), error, data, origins), prog)
        raise


def _merge(cls: type[BaseModel], command_line: CommandLine) -> tuple[Merger, list[Problem]]:
    """All layers, files first, and what is wrong with them."""
    merger = Merger(cls)
    problems = list(command_line.problems)
    for path in command_line.files:
        layer, found = read_toml(cls, path)
        problems += found
        if layer is not None:
            merger.add(layer)
    merger.add(flag_layer(command_line.values))
    merger.finish()
    return merger, problems + merger.problems


def _validate(cls: type[S], merger: Merger, problems: list[Problem]) -> tuple[S | None, list[Problem]]:
    """The valid settings, or what else is wrong: nothing that only follows from `problems`."""
    try:
        return cls.model_validate(merger.values), []
    except ValidationError as error:
        found = from_validation(cls, error, merger.values, merger.origins)
    broken = {problem.path for problem in problems}
    unread = any(not problem.path for problem in problems)
    return None, [
        problem
        for problem in found
        if not _follows(problem, broken)
        # A file that could not be read explains whatever is not set.
        and not (unread and problem.path not in merger.origins)
        # Checks of whole sections mean nothing while a key of them is missing for another reason.
        and not (
            broken and (not problem.path or any(key.shape.is_section for key in find_keys(cls, problem.path)))
        )
    ]


def _follows(problem: Problem, broken: set[KeyPath]) -> bool:
    return any(path and (problem.path[: len(path)] == path) for path in broken)
