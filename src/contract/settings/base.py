"""The base class of every configuration section.

Sections are frozen, refuse unknown keys and do not coerce types (an int is accepted where a float is
declared, nothing else). Every field has a `description` that says what it means, its unit, and what `None`
means; `--help` and the reference page are made from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Settings(BaseModel):
    """Base of configuration sections (pydantic model: frozen, strict, unknown keys are errors)."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=False,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


PathSetting = Annotated[Path, Field(strict=False), AfterValidator(Path.expanduser)]
"""A path given as a string in TOML or on the command line; a leading `~` is the home folder."""


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


FolderSetting = Annotated[str, BeforeValidator(_as_text)]
"""A folder: a path, or the URL of one in an object store."""
