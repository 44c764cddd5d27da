"""Slices of fused expert weights out of files that hold every expert on its own.

transformers keeps the experts of a layer in one tensor `[experts, rows, columns]`, while most checkpoints of
mixtures of experts store a matrix per expert and projection. Converting on load takes a full copy of the
model; here a rank reads only the experts and rows of its own shard. Which matrices make up which tensor is
transformers' own table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.model.weights import Slices, WeightReader


@dataclass(frozen=True, slots=True)
class MergeRule:
    """Tensors that end in `target` are the matrices `sources` (`*` is the expert), stacked over experts on
    dim 0, and then joined on dim 1 in this order.
    """

    target: str
    sources: tuple[str, ...]


def merge_rules(lm: PreTrainedModel) -> list[MergeRule]:
    """The rules of an architecture that only stack and join; other conversions are not among them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    rules = []
    for transform in get_model_conversion_mapping(lm):
        if not isinstance(transform, WeightConverter) or len(transform.target_patterns) != 1:
            continue
        operations = transform.operations
        stacks = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        joins = len(operations) == 2 and isinstance(operations[1], Concatenate) and operations[1].dim == 1
        has_one_source = len(transform.source_patterns) == 1
        if stacks and (joins or (len(operations) == 1 and has_one_source)):
            sources = tuple(_plain(pattern) for pattern in transform.source_patterns)
            if all(source.count("*") == 1 for source in sources):
                rules.append(MergeRule(_plain(transform.target_patterns[0]), sources))
    return rules


class ExpertReader:
    """Implements `weights.WeightReader`: the tensors of `base`, and those that `rules` make of them."""

    def __init__(self, base: WeightReader, rules: Iterable[MergeRule], needed: Iterable[str]) -> None:
        self._base = base
        self._sources: dict[str, list[list[str]]] = {}
        """By name of a merged tensor, for each of its sources, the matrix of every expert."""
        present = base.names()
        rules = list(rules)
        for name in needed:
            for rule in rules:
                if name not in present and name.endswith(rule.target):
                    prefix = name.removesuffix(rule.target)
                    found = [_experts(prefix + source, present) for source in rule.sources]
                    if found[0] and len({len(matrices) for matrices in found}) == 1:
                        self._sources[name] = found

    def names(self) -> set[str]:
        """See `WeightReader`."""
        return self._base.names() | set(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightReader`."""
        if name not in self._sources:
            return self._base.shape(name)
        rows = self._rows(name)
        return (len(self._sources[name][0]), sum(rows), *self._base.shape(self._sources[name][0][0])[1:])

    def read(self, name: str, slices: Slices) -> torch.Tensor:
        """See `WeightReader`."""
        if name not in self._sources:
            return self._base.read(name, slices)
        experts, rows, *others = (
            range(*cut.indices(size)) for cut, size in zip(slices, self.shape(name), strict=True)
        )
        others = tuple(slice(cut.start, cut.stop) for cut in others)
        read = [self._read_expert(name, expert, rows, others) for expert in experts]
        return torch.stack(read)

    def _read_expert(self, name: str, expert: int, rows: range, others: Slices) -> torch.Tensor:
        parts, first = [], 0
        for matrices, count in zip(self._sources[name], self._rows(name), strict=True):
            start, stop = max(rows.start, first), min(rows.stop, first + count)
            if start < stop:
                cut = (slice(start - first, stop - first), *others)
                parts.append(self._base.read(matrices[expert], cut))
            first += count
        return torch.cat(parts)

    def _rows(self, name: str) -> list[int]:
        return [self._base.shape(matrices[0])[0] for matrices in self._sources[name]]


def _plain(pattern: str) -> str:
    """A pattern of transformers' table without its escapes."""
    return pattern.replace("\\.", ".").removesuffix("$").removeprefix("^")


def _experts(pattern: str, present: set[str]) -> list[str]:
    """Names that `pattern` gives for expert 0, 1, ... as far as they exist."""
    names: list[str] = []
    while (name := pattern.replace("*", str(len(names)))) in present:
        names.append(name)
    return names
