"""A flat view of configuration classes: every key, the shape of its value, its default and its meaning.

Reading, `--help` and the reference page walk this view, so that they cannot disagree about what is valid. It
knows the annotations that configuration classes use (sections, unions of sections with a discriminator,
optional values, lists, dicts, literals, plain types); any other annotation is refused when the class is first
looked at.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

KeyPath = tuple[str, ...]

_SCALARS: dict[Any, str] = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True, slots=True)
class Shape:
    """What values a key takes.

    Attributes:
        kind: `section`, `union`, `list`, `dict`, `choice`, `bool`, `int`, `float`, `str` or `path`.
        optional: None is valid.
        section: the class of a `section`.
        discriminator: the key of a `union` that selects a variant.
        variants: classes of a `union` by the value of its discriminator, in the order of declaration.
        item: shape of the items of a `list`.
        choices: values of a `choice`.
        limits: bounds of a value, in words.
    """

    kind: str
    optional: bool = False
    section: type[BaseModel] | None = None
    discriminator: str | None = None
    variants: tuple[tuple[str, type[BaseModel]], ...] = ()
    item: Shape | None = None
    choices: tuple[str | int, ...] = ()
    limits: str = ""

    @property
    def is_section(self) -> bool:
        """Whether the value is a table of further keys."""
        return self.kind in ("section", "union")

    def variant(self, tag: object) -> type[BaseModel] | None:
        """The class that `tag` selects (of a `section`: always its class), or None."""
        if self.kind == "section":
            return self.section
        return next((section for other, section in self.variants if other == tag), None)

    def describe(self) -> str:
        """The valid values in words, e.g. `integer >= 1, or None`."""
        words = {
            "choice": " | ".join(str(choice) for choice in self.choices),
            "dict": "table (JSON on the command line)",
            "section": "table (JSON on the command line)",
        }
        if self.kind == "union":
            text = f"section of {self.discriminator} " + " | ".join(tag for tag, _ in self.variants)
        elif self.kind == "list":
            assert self.item is not None
            text = f"list of {self.item.describe()}"
        else:
            names = {"bool": bool, "int": int, "float": float, "str": str, "path": Path}
            text = words.get(self.kind) or _SCALARS.get(names.get(self.kind), self.kind)
        gap = "" if self.limits.startswith(",") else " "
        return text + (gap + self.limits if self.limits else "") + (", or None" if self.optional else "")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of one section."""

    name: str
    shape: Shape
    info: FieldInfo

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.info.is_required()

    @property
    def default(self) -> Any:
        """The default; only where the key is not required."""
        return self.info.get_default(call_default_factory=True)

    @property
    def description(self) -> str:
        """Meaning and unit."""
        return self.info.description or ""

    def default_tag(self) -> str | None:
        """Of a union: the variant taken when none is named, that of the default, or else the first one."""
        if self.shape.kind != "union":
            return None
        default = None if self.required else self.default
        if isinstance(default, BaseModel):
            return getattr(default, self.shape.discriminator or "")
        return self.shape.variants[0][0]


@cache
def keys_of(section: type[BaseModel]) -> dict[str, Key]:
    """The keys of `section`, in the order of declaration.

    Raises:
        TypeError: an annotation that configuration files cannot express.
    """
    return {
        name: Key(
            name,
            _shape(info.annotation, list(info.metadata), info.discriminator, f"{section.__name__}.{name}"),
            info,
        )
        for name, info in section.model_fields.items()
    }


def child_sections(shape: Shape) -> list[type[BaseModel]]:
    """The classes that a section may be of: one, or every variant of a union."""
    if shape.kind == "section":
        assert shape.section is not None
        return [shape.section]
    return [section for _, section in shape.variants]


def find_keys(root: type[BaseModel], path: KeyPath) -> list[Key]:
    """Every key that `path` may mean, one per variant of the unions on the way; empty if it is unknown."""
    sections = [root]
    for name in path[:-1]:
        keys = [keys_of(section)[name] for section in sections if name in keys_of(section)]
        sections = [child for key in keys if key.shape.is_section for child in child_sections(key.shape)]
    return [keys_of(section)[path[-1]] for section in sections if path[-1] in keys_of(section)]


def all_paths(root: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key path below `root`, sections and all variants included; a path may come more than once."""
    for name, key in keys_of(root).items():
        yield (*prefix, name)
        if key.shape.is_section:
            for child in child_sections(key.shape):
                yield from all_paths(child, (*prefix, name))


def _shape(annotation: Any, metadata: list[Any], discriminator: Any, where: str) -> Shape:
    """The shape of an annotation whose outer `Annotated` metadata is given apart."""
    optional = False
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation, *extra = get_args(annotation)
            for item in extra:
                if isinstance(item, FieldInfo):
                    metadata, discriminator = [*metadata, *item.metadata], discriminator or item.discriminator
                else:
                    metadata = [*metadata, item]
        elif origin in (Union, types.UnionType) and type(None) in get_args(annotation):
            optional = True
            arms = tuple(arm for arm in get_args(annotation) if arm is not type(None))
            annotation = Union[arms]  # noqa: UP007 (of a tuple that is known only now)
        else:
            break
    limits = _limits(metadata)
    if origin in (Union, types.UnionType) and isinstance(discriminator, str):
        variants = tuple(
            (tag, arm)
            for arm in get_args(annotation)
            for tag in get_args(arm.model_fields[discriminator].annotation)
        )
        return Shape("union", optional, discriminator=discriminator, variants=variants)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Shape("section", optional, section=annotation)
    if origin is Literal:
        return Shape("choice", optional, choices=get_args(annotation))
    if origin is list:
        return Shape("list", optional, item=_shape(get_args(annotation)[0], [], None, where), limits=limits)
    if origin is dict:
        return Shape("dict", optional, limits=limits)
    if annotation in _SCALARS:
        return Shape("path" if annotation is Path else annotation.__name__, optional, limits=limits)
    raise TypeError(f"{where}: a configuration file cannot express the type {annotation!r}")


def _limits(metadata: list[Any]) -> str:
    """Bounds in words: `>= 1 and < 10`, `of length 2`, `, not empty`, `matching ^a$`."""
    bounds = [
        f"{sign} {value:g}"
        for name, sign in _BOUNDS
        if (
            value := next(
                (getattr(item, name) for item in metadata if getattr(item, name, None) is not None), None
            )
        )
        is not None
    ]
    lengths = {
        name: value
        for item in metadata
        for name in ("min_length", "max_length")
        if (value := getattr(item, name, None))
    }
    text = " and ".join(bounds)
    if lengths.get("min_length") == lengths.get("max_length") is not None:
        text += f" of length {lengths['min_length']}"
    elif lengths == {"min_length": 1}:
        text += ", not empty"
    elif lengths:
        text += " of length " + " and ".join(
            f"{'>=' if 'min' in name else '<='} {n}" for name, n in lengths.items()
        )
    pattern = next((item.pattern for item in metadata if getattr(item, "pattern", None)), None)
    return (text + (f" matching `{pattern}`" if pattern else "")).strip()
