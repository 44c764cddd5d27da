"""Counters of packed parameters, which a checkpoint holds for every part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from contract.errors import CheckpointError
from trainer.optimizer.groups import CounterTargets
from trainer.parallel.layout import ModelParameter, Placement, Region


def test_parts_of_a_packed_parameter_with_unequal_counters_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(6, 2))
    regions = (Region("q", 0, 4), Region("k", 4, 6))
    item = ModelParameter(parameter, Placement.of("qk", parameter, regions))
    for counts, fits in (((3.0, 3.0), True), ((3.0, 2.0), False)):
        targets = CounterTargets({"qk": item}, {"qk": torch.zeros(())})
        for name, count in zip(("q.step", "k.step"), counts, strict=True):
            targets.tensors()[name].pieces[0].tensor.fill_(count)
        if fits:
            targets.check()
        else:
            with pytest.raises(CheckpointError, match=r"different numbers of times: \{'q': 3, 'k': 2\}"):
                targets.check()
