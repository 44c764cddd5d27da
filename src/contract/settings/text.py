"""Values as text: what a flag says, read according to the declared type and never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from contract.settings.schema import Shape

NONE = "None"
"""How None is written, on the command line and in TOML (which has no null)."""

_BOOLS = {"true": True, "True": True, "false": False, "False": False}


class TextError(ValueError):
    """A text that is not a value of the declared type; the message says what is valid."""


def parse(text: str, shape: Shape) -> Any:
    """The value that `text` means for a key of `shape`.

    Raises:
        TextError: it means none.
    """
    if text == NONE and shape.optional:
        return None
    try:
        match shape.kind:
            case "bool":
                return _BOOLS[text]
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "path":
                return Path(text)
            case "str":
                return text
            case "choice":
                return {str(choice): choice for choice in shape.choices}[text]
            case "list":
                return parse_list([text], shape)
            case _:
                return parse_table(text)
    except (ValueError, KeyError) as error:
        if isinstance(error, TextError):
            raise
        raise TextError(f"found {text!r}, valid is {shape.describe()}") from None


def parse_list(texts: list[str], shape: Shape) -> list[Any] | None:
    """The list that several words mean; a word that is a JSON list stands for its items.

    Raises:
        TextError: a word is not a valid item.
    """
    assert shape.item is not None
    if texts == [NONE] and shape.optional:
        return None
    items: list[Any] = []
    for text in texts:
        listed = _json_list(text)
        items.extend(listed if listed is not None else [parse(text, shape.item)])
    return items


def parse_table(text: str) -> dict[str, Any]:
    """The table that a JSON object means.

    Raises:
        TextError: it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TextError(f"found {text!r}, which is not JSON ({error}); valid is a JSON object") from None
    if not isinstance(value, dict):
        raise TextError(f"found {text!r}, valid is a JSON object")
    return value


def _json_list(text: str) -> list[Any] | None:
    if not text.startswith("["):
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, list) else None
