"""Layers put together, later over earlier, along the schema.

Every layer is checked on its own: an unknown key, a scalar where a section belongs (or the reverse) and an
unknown variant are found also where a later layer would hide them. Where a layer selects another variant of a
union, the keys that earlier layers set for the old variant alone are dropped, with a notice.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from contract.settings.problems import Problem, show, suggest
from contract.settings.schema import Key, KeyPath, Shape, child_sections, keys_of
from contract.settings.sources import Layer
from contract.settings.text import NONE


class Merger:
    """The merged values of all layers so far.

    Attributes:
        values: nested dict for pydantic.
        origins: where each key was set.
        notices: variants' keys that were dropped.
        problems: what is wrong with a layer.
    """

    def __init__(self, root: type[BaseModel]) -> None:
        self._root = root
        self.values: dict[str, Any] = {}
        self.origins: dict[KeyPath, str] = {}
        self.notices: list[str] = []
        self.problems: list[Problem] = []

    def add(self, layer: Layer) -> None:
        """Lay `layer` over what is there."""
        self._section(self.values, layer.data, [self._root], (), layer)

    def finish(self) -> None:
        """Fill in what a partly given section takes from its default, and the tables of required sections."""
        self._fill(self.values, self._root)

    def _section(
        self,
        target: dict[str, Any],
        data: Mapping[str, Any],
        sections: list[type[BaseModel]],
        path: KeyPath,
        layer: Layer,
    ) -> None:
        for name, value in data.items():
            here = (*path, name)
            key = next((keys_of(section)[name] for section in sections if name in keys_of(section)), None)
            if key is None:
                self._problem(here, layer, f"unknown key{suggest(self._root, here)}")
            elif (value is None or value == NONE) and key.shape.optional:
                self._drop_origins(here)
                target[name], self.origins[here] = None, layer.origin(here)
            elif key.shape.is_section:
                self._table(target, name, value, key, here, layer)
            elif isinstance(value, Mapping) and key.shape.kind != "dict":
                self._problem(
                    here,
                    layer,
                    f"is a value, not a section with keys of its own; valid is {key.shape.describe()}",
                )
            else:
                value = _with_null(value, key.shape)
                old = target.get(name)
                joined = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
                target[name], self.origins[here] = joined, layer.origin(here)

    def _table(
        self, target: dict[str, Any], name: str, value: Any, key: Key, path: KeyPath, layer: Layer
    ) -> None:
        """Lay the table `value` over the section `name` of `target`."""
        if not isinstance(value, Mapping):
            dotted = ".".join(path)
            example = next(iter(keys_of(child_sections(key.shape)[0])))
            none = f', or {dotted} = "None" to switch it off' if key.shape.optional else ""
            self._problem(
                path,
                layer,
                f"is a section, but was given as {show(value)}; write [{dotted}] with keys such as "
                f"{example}{none}",
            )
            return
        table = target.get(name)
        if not isinstance(table, dict):
            table = target[name] = {}
            self.origins.pop(path, None)
        self.origins.setdefault(path, layer.origin(path))
        if key.shape.kind == "union" and not self._select(table, value, key, path, layer):
            value = {other: item for other, item in value.items() if other != key.shape.discriminator}
        self._section(table, value, child_sections(key.shape), path, layer)

    def _select(
        self, table: dict[str, Any], value: Mapping[str, Any], key: Key, path: KeyPath, layer: Layer
    ) -> bool:
        """Switch `table` to the variant that `value` names, if any; False if there is no such variant."""
        name = key.shape.discriminator or ""
        if name not in value:
            return True
        tag, tags = value[name], [other for other, _ in key.shape.variants]
        if tag not in tags:
            near = difflib.get_close_matches(str(tag), tags, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            self._problem((*path, name), layer, f"found {show(tag)}, valid is {' | '.join(tags)}{hint}")
            return False
        old, new = key.shape.variant(table.get(name, key.default_tag())), key.shape.variant(tag)
        assert old is not None and new is not None
        for other in [other for other in table if other in keys_of(old) and other not in keys_of(new)]:
            dotted = ".".join((*path, other))
            self.notices.append(
                f"{dotted} = {show(table.pop(other))} ({self.origins.pop((*path, other), 'default')}) "
                f"is dropped: {'.'.join((*path, name))} is now {tag!r} ({layer.origin((*path, name))})"
            )
        return True

    def _fill(self, target: dict[str, Any], section: type[BaseModel]) -> None:
        for name, key in keys_of(section).items():
            if not key.shape.is_section:
                continue
            if name not in target and key.required and not key.shape.optional:
                target[name] = {}
            table = target.get(name)
            if not isinstance(table, dict):
                continue
            default = None if key.required else key.default
            if key.shape.kind == "union":
                table.setdefault(key.shape.discriminator or "", key.default_tag())
            chosen = _chosen(table, key.shape)
            if chosen is None:
                continue
            if isinstance(default, BaseModel) and type(default) is chosen:
                for field, item in default.model_dump(exclude_unset=True).items():
                    table.setdefault(field, item)
            self._fill(table, chosen)

    def _drop_origins(self, path: KeyPath) -> None:
        for other in [other for other in self.origins if other[: len(path)] == path]:
            del self.origins[other]

    def _problem(self, path: KeyPath, layer: Layer, message: str) -> None:
        self.problems.append(Problem(path, layer.origin(path), message))


def _chosen(table: Mapping[str, Any], shape: Shape) -> type[BaseModel] | None:
    """The class that a complete table is of."""
    return shape.variant(table.get(shape.discriminator or ""))


def _with_null(value: Any, shape: Shape) -> Any:
    """`value` with "None" read as None inside the tables of a list."""
    if shape.item is None or not shape.item.is_section or not isinstance(value, list):
        return value
    keys = {name: key for section in child_sections(shape.item) for name, key in keys_of(section).items()}
    return [
        {
            name: None if item == NONE and name in keys and keys[name].shape.optional else item
            for name, item in table.items()
        }
        if isinstance(table, Mapping)
        else table
        for table in value
    ]
