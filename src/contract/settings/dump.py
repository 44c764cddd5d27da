"""A configuration as TOML that reads back as an equal configuration."""

from __future__ import annotations

import tomllib
from typing import Any

import tomli_w
from pydantic import BaseModel

from contract.settings.text import NONE


def to_toml(settings: BaseModel, *, header: str = "") -> str:
    """Every key of `settings` as TOML, defaults included; None is written as the string "None".

    Args:
        header: text for a comment at the top.
    """
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return (
        comment + ("\n" if comment else "") + tomli_w.dumps(_without_null(settings.model_dump(mode="json")))
    )


def read_values(text: str) -> dict[str, Any]:
    """The values in what `to_toml` wrote, for whoever does not know its class.

    Raises:
        ValueError: it is not TOML.
    """
    return _with_null(tomllib.loads(text))


def _with_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_null(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_null(item) for item in value]
    return None if value == NONE else value


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_null(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return NONE if value is None else value
