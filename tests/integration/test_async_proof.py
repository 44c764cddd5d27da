"""A save behind the step holds the state of its step, to the last bit, however the step goes on.

Two ranks train with the real loop and save at steps 2 and 4. At both steps a synchronous save of the same
state is the reference. No byte of an asynchronous save is written before the next step is on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.layout import RunFolder
from tests.support.engine import ListSource, Recorder, build_sharded, rank_process, step_batch
from tests.support.ranks import run_ranks
from tests.support.resume import planned
from tests.support.tiny_model import write_tiny_model
from tests.unit.trainer.checkpoint.fakes import Gate, GatedStorage
from tests.unit.trainer.test_parity import rows_of
from trainer.checkpoint.base import Part
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.reader import read_tensors, read_values
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig
from trainer.config.model import Offload
from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig, SignSGDConfig
from trainer.engine import Engine
from trainer.hooks.base import BaseHook, Hook
from trainer.loop import Loop
from trainer.objective.cross_entropy import CrossEntropy
from trainer.optimizer.base import Optimizer
from trainer.optimizer.factory import build_optimizer
from trainer.parallel.process import Process
from trainer.parallel.stop import Requests
from trainer.parts import DataPart, ModelPart, StatePart
from trainer.publish.base import NoPublisher
from trainer.state import TrainState

SAVED_STEPS = (2, 4)
NUM_STEPS = 5
# About 2,600 elements: every matrix of the tiny model is cut, and its chunks are many.
CHUNK_BYTES = 10_000

MODES: dict[str, tuple[Offload, OptimizerConfig]] = {
    "optimizer, adamw": ("optimizer", AdamWConfig(lr=3e-3, weight_decay=0.1)),
    "optimizer, muon": ("optimizer", MuonConfig(lr=3e-3)),
    "full, adamw": ("full", AdamWConfig(lr=3e-3, weight_decay=0.1)),
    "full, adamw within backward": (
        "full",
        AdamWConfig(lr=3e-3, weight_decay=0.1, max_grad_norm=None, on_non_finite="stop"),
    ),
    "full, signsgd": ("full", SignSGDConfig(lr=1e-4)),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "packed": {"fusions": ["qkv", "gate_up"]},
    "packed, sharded on dim 1": {"fusions": ["qkv", "gate_up"], "shard_fused_on_dim1": True},
}


@dataclass(frozen=True)
class Case:
    """`holds` is whether the optimizer is told of saves."""

    mode: str
    layout: str
    holds: bool = True


class Run:
    """The state of one run, and the real loop over it."""

    def __init__(self, model_folder: str, process: Process, case: Case, *, seed: int = 0) -> None:
        offload, config = MODES[case.mode]
        self.process = process
        self.model = build_sharded(model_folder, process, seed=seed, offload=offload, **LAYOUTS[case.layout])
        self.optimizer: Optimizer = build_optimizer(
            config,
            self.model.run_parameters(),
            block_parameters=self.model.block_parameters(),
            offload=offload,
            chunk_bytes=CHUNK_BYTES,
            process=process,
        )
        self.model.masters.clear()
        self.max_grad_norm = config.max_grad_norm
        self.state = TrainState()
        self.source = ListSource([step_batch(rows_of(step, False), process, 2) for step in range(NUM_STEPS)])
        self.parts: dict[str, Part] = {
            "model": ModelPart(self.model, self.optimizer),
            "optimizer": self.optimizer,
            "schedule": StatePart.schedule(self.state),
            "progress": StatePart.progress(self.state),
            "data": DataPart(self.source),
        }

    def train(self, manager: CheckpointManager, hooks: Sequence[Hook] = ()) -> list[dict[str, Any]]:
        """Metrics of every step up to the last."""
        engine = Engine(
            self.model,
            self.optimizer,
            CrossEntropy(self.model.vocab_size),
            self.process.device,
            is_varlen=True,
            max_grad_norm=self.max_grad_norm,
        )
        recorder = Recorder()
        loop = Loop(
            process=self.process,
            engine=engine,
            source=self.source,
            publisher=NoPublisher(),
            checkpoint=manager,
            hooks=hooks,
            reporter=recorder,
            requests=Requests(),
            state=self.state,
            schedule=lambda n: 1.0 / n,
            total_steps=NUM_STEPS,
            on_non_finite="stop",
        )
        loop.fit()
        self.optimizer.close()
        return recorder.steps


class Referee(BaseHook):
    """Saves the reference while the asynchronous write of the same state waits at the gate, and opens that:
    a moment later, when the next step waits already; or, where nothing is held, after the next step.
    """

    def __init__(
        self, manager: CheckpointManager, reference: CheckpointManager, gate: Gate, holds: bool
    ) -> None:
        self._manager = manager
        self._reference = reference
        self._gate = gate
        self._holds = holds

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        if state.step in SAVED_STEPS:
            self._reference.save(state.step).result()
            if self._holds:
                threading.Timer(0.3, self._gate.open.set).start()
        else:
            self._gate.open.set()
            self._manager.poll(wait=True)
            if state.step + 1 in SAVED_STEPS:
                self._gate.close()
        return {}


def prove(root: str, model_folder: str, case: Case) -> tuple[list[list[str]], float, float]:
    """Tensors that differ at each saved step; the loss of step 5, and that of a run resumed at step 4."""
    process, gate = rank_process(), Gate()
    folder, reference = RunFolder(Path(root) / "run"), RunFolder(Path(root) / "reference")
    run = Run(model_folder, process, case)
    # Its own groups: both saves are under way at the same time.
    referee = CheckpointManager(CheckpointConfig(), reference, rank_process(), run.parts, {})
    manager = CheckpointManager(
        CheckpointConfig(async_save=True, interval=2),
        folder,
        process,
        run.parts,
        {},
        state_owners=[run.optimizer] if case.holds else [],
        is_state_on_host=True,
        storage=GatedStorage(folder.checkpoints, gate),
    )
    with manager:
        hook = Referee(manager, referee, gate, case.holds)
        losses = [values["loss"] for values in run.train(manager, [hook])]
    # SignSGD keeps no state.
    parts = ("model",) if "signsgd" in case.mode else ("model", "optimizer")
    differing = [compare(folder, reference, step, parts) for step in SAVED_STEPS] if process.is_main else []
    process.barrier()

    other = Run(model_folder, process, case, seed=1)
    resumed = CheckpointManager(None, folder, process, other.parts, {})
    resumed.load(planned(ResumeConfig(step=4), folder, process, {}))
    (last,) = other.train(resumed)
    return differing, losses[-1], last["loss"]


def compare(folder: RunFolder, reference: RunFolder, step: int, parts: Sequence[str]) -> list[str]:
    """Names of the tensors that differ; everything else must be equal."""
    paths = [place.checkpoints / f"step_{step}" for place in (folder, reference)]
    found, expected = (
        {f"{part}.{name}": tensor for part in parts for name, tensor in read_tensors(path, part).items()}
        for path in paths
    )
    assert found.keys() == expected.keys() and any(name.endswith("q_proj.weight") for name in found)
    assert read_values(paths[0]) == read_values(paths[1])
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_differs_from_the_synchronous_save_and_the_run_goes_on_exactly(
    tmp_path: Path, model_folder: str, mode: str, layout: str
) -> None:
    first, second = run_ranks(prove, 2, str(tmp_path), model_folder, Case(mode, layout))
    assert first[0] == [[], []]
    for _, loss, resumed in (first, second):
        assert resumed == loss


@pytest.mark.parametrize("mode", MODES)
def test_without_the_hold_the_save_holds_what_the_next_step_made_of_it(
    tmp_path: Path, model_folder: str, mode: str
) -> None:
    (differing, *_), _ = run_ranks(prove, 2, str(tmp_path), model_folder, Case(mode, "single", holds=False))
    assert all(differing)
