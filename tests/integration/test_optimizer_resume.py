"""A checkpoint carries the optimizer's counters and group options on from run to run, in every mode.

Two ranks save and load with the true manager. On the second rank the group without decay is empty; one
parameter gets its first gradient late, and one never gets any.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contract.layout import RunFolder
from tests.support.engine import Array, difference, rank_process, whole
from tests.support.ranks import run_ranks
from tests.support.resume import planned
from tests.unit.trainer.optimizer.cases import (
    CHUNK_BYTES,
    SHAPES,
    UNUSED,
    as_model,
    parameters,
    random_tensor,
)
from trainer.checkpoint.base import Part
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig
from trainer.config.model import Offload
from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig, SignSGDConfig
from trainer.optimizer.base import Optimizer
from trainer.optimizer.factory import build_optimizer
from trainer.parallel.layout import LogicalTensor, ModelParameter, local_part
from trainer.parallel.process import Process

LATE = "embed.weight"
"""Has its first gradient in the second update: its counter is behind the others."""

ADAMW = AdamWConfig(lr=0.1, weight_decay=0.1)
WITHIN_BACKWARD = AdamWConfig(lr=0.1, weight_decay=0.1, max_grad_norm=None, on_non_finite="stop")
SGD = SGDConfig(lr=0.1, momentum=0.9)
SIGNSGD = SignSGDConfig(lr=0.1)
MUON = MuonConfig(lr=0.1)
OPTIMIZERS: dict[Offload, list[OptimizerConfig]] = {
    "none": [ADAMW, SGD, SIGNSGD, MUON],
    "optimizer": [ADAMW, SGD, SIGNSGD, MUON],
    "full": [ADAMW, WITHIN_BACKWARD, SGD, SIGNSGD],
}


class Weights:
    """Part `model`: the parameters, or the copies that the optimizer keeps of them."""

    def __init__(self, model: dict[str, ModelParameter], optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def tensors(self) -> dict[str, LogicalTensor]:
        found: dict[str, LogicalTensor] = {}
        for item in self._model.values():
            found |= item.placement.logical(local_part(item.parameter), "device")
        return {**found, **self._optimizer.weights()}

    def values(self) -> dict[str, Any]:
        return {}

    def tensors_to_load(self, names: Any) -> dict[str, LogicalTensor]:
        assert set(names) == set(self.tensors())
        return self.tensors()

    def loaded(self, values: Any) -> None:
        self._optimizer.weights_loaded()


class Run:
    """Parameters, their optimizer and its manager."""

    def __init__(self, root: str, process: Process, mode: Offload, config: OptimizerConfig) -> None:
        self.process, self.folder = process, RunFolder(Path(root))
        self.named = parameters()
        model = as_model(self.named)
        self.optimizer = build_optimizer(
            config,
            model,
            block_parameters=[name for name in model if "layers" in name],
            offload=mode,
            chunk_bytes=CHUNK_BYTES,
            process=process,
        )
        parts: dict[str, Part] = {"model": Weights(model, self.optimizer), "optimizer": self.optimizer}
        self.manager = CheckpointManager(
            CheckpointConfig(async_save=mode != "none"),
            self.folder,
            process,
            parts,
            {},
            state_owners=[self.optimizer],
            is_state_on_host=mode != "none",
        )

    def update(self, steps: range) -> None:
        """Updates with gradients that only the number of the step decides."""
        for step in steps:
            self.optimizer.before_backward(1.0 / (step + 1))
            for index, (name, shape) in enumerate(SHAPES.items()):
                if name != LATE or step > 0:
                    hand_over(self.named[name], random_tensor(1000 * (step + 1) + index, shape))
            self.optimizer.grad_norm()
            self.optimizer.step(1.0 / (step + 1), 1.0)
            self.optimizer.zero_grad()

    def change_options(self) -> None:
        """As a run may change them while it trains: the group that is empty on the second rank."""
        values = self.optimizer.values()
        values["groups"]["no_decay"]["options"]["weight_decay"] = 0.25
        values["groups"]["no_decay"]["peak_lr"] = 0.05
        self.optimizer.loaded(values)

    def of_optimizer(self) -> tuple[dict[str, Any], dict[str, int], list[str]]:
        """Its options, its counters by parameter, and the names of its state."""
        state = self.optimizer.tensors()
        counters = {
            name.removesuffix(".step"): int(item.pieces[0].tensor)
            for name, item in state.items()
            if name.endswith(".step")
        }
        return self.optimizer.values(), counters, sorted(state)

    def end(self) -> None:
        self.manager.close()
        self.optimizer.close()


def hand_over(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """As FSDP does when it has reduced a gradient."""
    parameter.grad = gradient
    hooks: Any = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    for hook in (hooks or {}).values():
        hook(parameter)


@dataclass(frozen=True)
class Found:
    """What one rank saw: options, counters and names of state as saved and as loaded; the ends of the run in
    one go and of the resumed one.
    """

    config: OptimizerConfig
    saved: tuple[dict[str, Any], dict[str, int], list[str]]
    loaded: tuple[dict[str, Any], dict[str, int], list[str]]
    ends: list[tuple[dict[str, Array], dict[str, Any], dict[str, int]]]


def save_and_go_on(root: str, process: Process, mode: Offload, config: OptimizerConfig) -> Found:
    first = Run(root, process, mode, config)
    assert local_part(first.named["layers.0.norm.weight"]).numel() == (1 if process.is_main else 0)
    first.update(range(2))
    first.change_options()
    saved = first.of_optimizer()
    first.manager.save(2)
    first.update(range(2, 4))
    first.manager.wait()
    second = Run(root, process, mode, config)
    second.update(range(1))  # what is loaded replaces all of it
    second.manager.load(planned(ResumeConfig(), second.folder, process, {}))
    loaded = second.of_optimizer()
    second.update(range(2, 4))
    ends = []
    for run in (first, second):
        weights = {name: whole(item) for name, item in run.named.items()}
        ends.append((weights, *run.of_optimizer()[:2]))
        run.end()
    return Found(config, saved, loaded, ends)


def with_each(root: str, mode: Offload) -> list[Found]:
    process = rank_process()
    return [
        save_and_go_on(f"{root}/{index}", process, mode, config)
        for index, config in enumerate(OPTIMIZERS[mode])
    ]


@pytest.mark.parametrize("mode", OPTIMIZERS)
def test_counters_and_options_of_every_group_survive_a_save_and_resume(tmp_path: Path, mode: Offload) -> None:
    main, other = run_ranks(with_each, 2, str(tmp_path), mode)
    assert [found.saved for found in main] == [found.saved for found in other]
    for found in [*main, *other]:
        options, counters, names = found.saved
        assert found.loaded == found.saved
        group = options["groups"]["no_decay"]
        assert (group["options"]["weight_decay"], group["peak_lr"]) == (0.25, 0.05)
        assert not any(name.startswith(UNUSED) for name in names)
        if found.config.type == "adamw":
            assert counters == {LATE: 1, "layers.0.proj.weight": 2, "layers.0.norm.weight": 2}
        (straight, *rest), (resumed, *rest_resumed) = found.ends
        assert difference(straight, resumed) == 0.0
        assert rest == rest_resumed
