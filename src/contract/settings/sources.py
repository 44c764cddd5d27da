"""Where values come from: TOML files and flags, each one layer of a nested dict whose keys know their origin.

Files are read by pydantic-settings' TOML source and flags by a source of the same family, so that both hand
over what pydantic validates. Nothing is merged or checked against the schema here; that is `merge`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_settings import TomlConfigSettingsSource

from contract.settings.problems import COMMAND_LINE, Problem
from contract.settings.schema import KeyPath

_TABLE = re.compile(r"^\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"^\s*([A-Za-z0-9_\-.\"']+)\s*=")


@dataclass(frozen=True, slots=True)
class Layer:
    """The values of one source.

    Attributes:
        data: nested dict, as written.
        origin: says where a key path was set, e.g. `configs/a.toml, line 3`.
        label: name of the source as a whole.
    """

    data: Mapping[str, Any]
    origin: Callable[[KeyPath], str]
    label: str


class _TomlFile(TomlConfigSettingsSource):
    """One TOML file that must exist; pydantic-settings ignores a missing one."""

    def __init__(self, settings_cls: type[BaseModel], path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(path)
        # The source reads only `model_config` and `model_fields`, which every pydantic model has.
        super().__init__(settings_cls, toml_file=path)  # type: ignore[arg-type]


def read_toml(settings_cls: type[BaseModel], path: Path) -> tuple[Layer | None, list[Problem]]:
    """The layer of one file, or what prevents reading it."""
    try:
        data = _TomlFile(settings_cls, path).toml_data
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        what = "is a folder, not a file" if path.is_dir() else "there is no such file"
        return None, [Problem((), f"@ {path}", f"configuration file: {what}")]
    except tomllib.TOMLDecodeError as error:
        return None, [Problem((), _syntax_place(path, str(error)), f"not valid TOML: {error}")]
    except UnicodeDecodeError as error:
        return None, [Problem((), f"@ {path}", f"configuration file is not UTF-8 text: {error.reason}")]
    except OSError as error:
        return None, [Problem((), f"@ {path}", f"configuration file cannot be read: {error.strerror}")]
    lines = _line_numbers(text)

    def origin(key: KeyPath) -> str:
        for length in range(len(key), 0, -1):
            if key[:length] in lines:
                return f"{path}, line {lines[key[:length]]}"
        return str(path)

    return Layer(data, origin, str(path)), []


def flag_layer(data: Mapping[str, Any]) -> Layer:
    """The layer of the command line."""
    return Layer(data, lambda key: COMMAND_LINE, COMMAND_LINE)


def _syntax_place(path: Path, message: str) -> str:
    found = re.search(r"at line (\d+)", message)
    return f"{path}, line {found.group(1)}" if found else str(path)


def _line_numbers(text: str) -> dict[KeyPath, int]:
    """The line of each key and table header. Serves messages only: a text inside a multi-line string may
    mislead it.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = _split(header.group(1))
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault((*table, *_split(assignment.group(1))), number)
    return lines


def _split(dotted: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
