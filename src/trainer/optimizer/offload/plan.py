"""How parameters are cut into chunks that are moved and updated at once. Pure: sizes in, chunks out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.optimizer.groups import GroupSpec


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `start` to `stop` of the flattened local shard of the parameter `name`."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """Spans of parameters of one group."""

    group: str
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(span.numel for span in self.spans)


def plan_chunks(numels: Mapping[str, int], groups: Sequence[GroupSpec], chunk_numel: int) -> list[Chunk]:
    """Chunks of at most `chunk_numel` elements that hold every element once.

    Parameters of a group that is not elementwise stay whole; one that is larger than the limit has a chunk
    of its own. A parameter without elements is in no chunk.

    Args:
        numels: elements by parameter, in the order in which a snapshot is written: chunks are ordered by
            their last element, so that a step during a write follows the writer. Ranks agree on the chunks of
            a group if they agree on its sizes.
        groups: each parameter is in one of them.
        chunk_numel: at least 1.
    """
    group_of = {name: group for group in groups for name in group.parameters}
    chunks: list[Chunk] = []
    is_open: dict[str, list[Span]] = {group.name: [] for group in groups}
    for name, numel in numels.items():
        group = group_of[name]
        spans = is_open[group.name]
        start = 0
        while start < numel:
            room = chunk_numel - sum(span.numel for span in spans)
            fits = room > 0 if group.is_elementwise else numel <= room or not spans
            if not fits:
                chunks.append(Chunk(group.name, tuple(spans)))
                spans.clear()
                continue
            stop = min(numel, start + room) if group.is_elementwise else numel
            spans.append(Span(name, start, stop))
            start = stop
    chunks += [Chunk(name, tuple(spans)) for name, spans in is_open.items() if spans]
    position = {name: index for index, name in enumerate(numels)}
    return sorted(chunks, key=lambda chunk: (position[chunk.spans[-1].name], chunk.spans[-1].stop))
