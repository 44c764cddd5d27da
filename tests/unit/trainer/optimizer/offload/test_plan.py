"""Chunks of parameters, written out by hand and as properties of random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from trainer.optimizer.groups import GroupSpec
from trainer.optimizer.offload.plan import Chunk, Span, plan_chunks


def sgd(tensors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors)


def group(name: str, *parameters: str, is_elementwise: bool = True) -> GroupSpec:
    return GroupSpec(name, parameters, sgd, is_elementwise)


CUT, WHOLE = group("cut", "a", "b", "c"), group("whole", "a", "b", "c", is_elementwise=False)


@pytest.mark.parametrize(
    ("numels", "groups", "limit", "expected"),
    [
        ({}, [], 4, []),
        ({"a": 4}, [CUT], 4, [("cut", ("a", 0, 4))]),
        ({"a": 5}, [CUT], 2, [("cut", ("a", 0, 2)), ("cut", ("a", 2, 4)), ("cut", ("a", 4, 5))]),
        (
            {"a": 3, "b": 0, "c": 6},
            [CUT],
            4,
            [("cut", ("a", 0, 3), ("c", 0, 1)), ("cut", ("c", 1, 5)), ("cut", ("c", 5, 6))],
        ),
        (
            {"a": 3, "b": 2, "c": 9},
            [WHOLE],
            5,
            [("whole", ("a", 0, 3), ("b", 0, 2)), ("whole", ("c", 0, 9))],
        ),
        ({"a": 3, "b": 4}, [WHOLE], 5, [("whole", ("a", 0, 3)), ("whole", ("b", 0, 4))]),
        # Small ones of another group wait for each other; their chunk comes where its last one stands.
        (
            {"a": 4, "n": 1, "b": 4, "m": 1, "c": 4},
            [CUT, group("norms", "n", "m")],
            4,
            [
                ("cut", ("a", 0, 4)),
                ("cut", ("b", 0, 4)),
                ("norms", ("n", 0, 1), ("m", 0, 1)),
                ("cut", ("c", 0, 4)),
            ],
        ),
    ],
)
def test_chunks_by_hand(
    numels: dict[str, int], groups: list[GroupSpec], limit: int, expected: list[tuple[object, ...]]
) -> None:
    found = [
        (chunk.group, *((span.name, span.start, span.stop) for span in chunk.spans))
        for chunk in plan_chunks(numels, groups, limit)
    ]
    assert found == expected


def test_every_element_is_in_one_chunk_and_no_chunk_is_larger_than_it_must_be() -> None:
    draw = random.Random(0)
    for _ in range(300):
        numels = {f"p{index}": draw.choice([0, 1, 3, 8, 50]) for index in range(draw.randrange(12))}
        kinds = {name: draw.randrange(3) for name in numels}
        groups = [
            group(str(kind), *(n for n in numels if kinds[n] == kind), is_elementwise=kind != 2)
            for kind in range(3)
        ]
        limit = draw.randrange(1, 20)
        chunks = plan_chunks(numels, groups, limit)
        check(numels, groups, limit, chunks)


def check(numels: dict[str, int], groups: list[GroupSpec], limit: int, chunks: list[Chunk]) -> None:
    elements = [
        (span.name, element)
        for chunk in chunks
        for span in chunk.spans
        for element in range(span.start, span.stop)
    ]
    assert len(elements) == len(set(elements))
    assert set(elements) == {(name, index) for name, numel in numels.items() for index in range(numel)}
    by_name = {item.name: item for item in groups}
    for chunk in chunks:
        assert {span.name for span in chunk.spans} <= set(by_name[chunk.group].parameters)
        assert all(span.numel for span in chunk.spans)
        whole = len(chunk.spans) == 1 and not by_name[chunk.group].is_elementwise
        assert chunk.numel <= limit or whole
        if not by_name[chunk.group].is_elementwise:
            assert all(span == Span(span.name, 0, numels[span.name]) for span in chunk.spans)
    names = list(numels)
    last = [(names.index(chunk.spans[-1].name), chunk.spans[-1].stop) for chunk in chunks]
    assert last == sorted(last)
    for item in groups:
        own = [span for chunk in chunks if chunk.group == item.name for span in chunk.spans]
        assert own == sorted(own, key=lambda span: (names.index(span.name), span.start))
