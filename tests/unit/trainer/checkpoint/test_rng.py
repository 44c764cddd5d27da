"""Random states, against the numbers that the generators give."""

from __future__ import annotations

import random

import numpy as np
import torch

from trainer.checkpoint import rng
from trainer.parallel.device import Device

CPU = Device(torch.device("cpu"))


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))


def test_after_restoring_every_generator_goes_on_as_it_would_have() -> None:
    # One draw of each gaussian leaves its second half cached in the generator: that half is state as well.
    random.gauss(0, 1)
    np.random.standard_normal()
    state = rng.capture(CPU)
    expected = draw(), draw()
    draw()
    rng.restore(state, CPU)
    assert (draw(), draw()) == expected


def test_reseeding_is_the_same_every_time_and_differs_by_rank_and_world_size() -> None:
    state = rng.capture(CPU)
    drawn = []
    for rank, world_size in ((0, 2), (1, 2), (0, 3), (0, 2)):
        rng.reseed(state, rank, world_size)
        drawn.append(draw())
    assert drawn[0] == drawn[3]
    assert all(len({values[index] for values in drawn[:3]}) == 3 for index in range(4))
