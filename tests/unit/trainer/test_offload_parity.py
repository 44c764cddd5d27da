"""`model.offload` changes where numbers are computed, and none of the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine import (
    Array,
    build_sharded,
    difference,
    rank_process,
    step_batch,
    weights_of,
)
from tests.support.ranks import run_ranks
from tests.unit.trainer.test_parity import rows_of
from trainer.config.model import Offload
from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig, SignSGDConfig
from trainer.engine import Engine
from trainer.model.causal_lm import CausalLM
from trainer.objective.base import DeviceBatch, Head
from trainer.objective.cross_entropy import CrossEntropy
from trainer.optimizer.base import Optimizer
from trainer.optimizer.factory import build_optimizer
from trainer.parallel.process import Process

NUM_STEPS = 10
MAX_NORM = 0.5
MODES: tuple[Offload, ...] = ("none", "optimizer", "full")
FULL: tuple[Offload, ...] = ("none", "full")
CLIPPED = AdamWConfig(lr=3e-3, weight_decay=0.1, max_grad_norm=MAX_NORM)
EARLY = AdamWConfig(lr=3e-3, weight_decay=0.1, max_grad_norm=None, on_non_finite="stop")
# About 2,600 elements: every matrix of the tiny model is cut, and its chunks are many.
CHUNK_BYTES = 10_000


@dataclass(frozen=True)
class Variant:
    """A way to train on eight rows per update, which all ranks share."""

    optimizer: OptimizerConfig
    micro_batch_size: int
    dp_replicate: int = 1
    modes: tuple[Offload, ...] = MODES
    settings: dict[str, Any] = field(default_factory=dict)


CHECKPOINTING = {"activation_checkpointing": "block"}
GATHERED = {"reshard_after_forward": False}
VARIANTS: dict[int, dict[str, Variant]] = {
    1: {
        "clipped": Variant(CLIPPED, 2),
        "clipped, one micro-batch, gathered between": Variant(CLIPPED, 8, settings=GATHERED),
        "early": Variant(EARLY, 2, modes=FULL),
        "early, one micro-batch, gathered between": Variant(EARLY, 8, modes=FULL, settings=GATHERED),
        "sgd, activation checkpointing": Variant(
            SGDConfig(lr=0.1, momentum=0.9, max_grad_norm=MAX_NORM), 2, settings=CHECKPOINTING
        ),
        "signsgd": Variant(SignSGDConfig(lr=1e-4, max_grad_norm=MAX_NORM), 2),
        "clipped, gathered between, activation checkpointing": Variant(
            CLIPPED, 2, settings=GATHERED | CHECKPOINTING
        ),
    },
    2: {
        "clipped": Variant(CLIPPED, 1),
        "clipped, gathered between, activation checkpointing": Variant(
            CLIPPED, 2, settings=GATHERED | CHECKPOINTING
        ),
        "early, activation checkpointing": Variant(EARLY, 2, modes=FULL, settings=CHECKPOINTING),
        "muon": Variant(MuonConfig(lr=3e-3, max_grad_norm=MAX_NORM), 2, modes=MODES[:2]),
    },
    4: {
        "clipped": Variant(CLIPPED, 1),
        "clipped replicas": Variant(CLIPPED, 1, dp_replicate=2),
        "early replicas, gathered between": Variant(EARLY, 1, 2, FULL, GATHERED),
        "clipped, gathered between, activation checkpointing": Variant(
            CLIPPED, 1, settings=GATHERED | CHECKPOINTING
        ),
        "early, activation checkpointing": Variant(EARLY, 1, modes=FULL, settings=CHECKPOINTING),
    },
}
CASES = [
    (world_size, name, mode)
    for world_size, variants in VARIANTS.items()
    for name, variant in variants.items()
    for mode in variant.modes[1:]
]


class Trainer:
    """A model in one mode, whose optimizer can be looked at, and single updates."""

    def __init__(
        self,
        folder: str,
        process: Process,
        mode: Offload,
        variant: Variant,
        objective: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.process, self.variant = process, variant
        self.model: CausalLM = build_sharded(
            folder,
            process,
            dp_replicate=variant.dp_replicate,
            compute_dtype=dtype,
            offload=mode,
            **variant.settings,
        )
        self.optimizer: Optimizer = build_optimizer(
            variant.optimizer,
            self.model.run_parameters(),
            block_parameters=self.model.block_parameters(),
            offload=mode,
            chunk_bytes=CHUNK_BYTES,
            process=process,
        )
        self.engine = Engine(
            self.model,
            self.optimizer,
            objective or CrossEntropy(self.model.vocab_size),
            process.device,
            is_varlen=True,
            max_grad_norm=variant.optimizer.max_grad_norm,
        )

    def run(self, steps: Sequence[int]) -> list[tuple[float, float]]:
        """Loss and gradient norm of each update; one whose norm is not finite is dropped."""
        found = []
        for step in steps:
            batch = step_batch(rows_of(step, False), self.process, self.variant.micro_batch_size)
            local = float(sum(item.count_trainable("ce") for item in batch.micro_batches))
            count = self.process.all_sum([local])[0]
            lr_factor = 1.0 / (step + 1)
            sums = self.engine.forward_backward(batch.micro_batches, {"ce": count}, lr_factor=lr_factor)
            norm = self.engine.grad_norm()
            if math.isfinite(norm):
                self.engine.update(lr_factor, norm)
            else:
                self.engine.discard()
            found.append((self.process.all_sum([sums["loss"]])[0], norm))
        return found

    def state(self) -> dict[str, Array]:
        """This rank's share of the optimizer's state."""
        return pieces_of(self.optimizer.tensors())


def pieces_of(tensors: Mapping[str, Any]) -> dict[str, Array]:
    return {
        f"{name} at {piece.offsets}": piece.tensor.numpy().copy()
        for name, item in tensors.items()
        for piece in item.pieces
    }


@dataclass(frozen=True)
class Trace:
    values: list[tuple[float, float]]
    weights: dict[str, Array]
    state: dict[str, Array]


def train(folder: str, process: Process, mode: Offload, variant: Variant, **arguments: Any) -> Trace:
    trainer = Trainer(folder, process, mode, variant, **arguments)
    values = trainer.run(range(NUM_STEPS))
    trainer.optimizer.close()
    return Trace(values, weights_of(trainer.model), trainer.state())


def train_all(folder: str) -> dict[tuple[str, Offload], Trace]:
    process = rank_process()
    return {
        (name, mode): train(folder, process, mode, variant)
        for name, variant in VARIANTS[process.world_size].items()
        for mode in variant.modes
    }


def check_same(left: Trace, right: Trace) -> None:
    for mine, theirs in zip(left.values, right.values, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    assert difference(left.weights, right.weights) <= 1e-6
    assert left.state.keys() == right.state.keys()
    for name, item in left.state.items():
        assert abs(item - right.state[name]).max() <= 1e-6, name


@pytest.fixture(scope="module")
def traces(tiny_llama: Path) -> dict[int, list[dict[tuple[str, Offload], Trace]]]:
    return {world_size: run_ranks(train_all, world_size, str(tiny_llama)) for world_size in VARIANTS}


@pytest.mark.parametrize(("world_size", "name", "mode"), CASES)
def test_ten_updates_are_those_of_a_run_without_offload(
    world_size: int,
    name: str,
    mode: Offload,
    traces: dict[int, list[dict[tuple[str, Offload], Trace]]],
) -> None:
    for of_rank in traces[world_size]:
        plain = of_rank[name, "none"]
        assert min(norm for _, norm in plain.values) > MAX_NORM, (
            "where it is clipped, it must be in each step"
        )
        check_same(of_rank[name, mode], plain)


class SpoiledLoss:
    """Cross-entropy whose gradient is NaN in one call."""

    def __init__(self, vocab_size: int, spoiled_call: int | None) -> None:
        self._inner = CrossEntropy(vocab_size)
        self._spoiled_call = spoiled_call
        self._calls = 0

    @property
    def components(self) -> tuple[str, ...]:
        return self._inner.components

    def __call__(
        self, hidden_TD: torch.Tensor, head: Head, batch: DeviceBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, reported = self._inner(hidden_TD, head, batch, denominators)
        self._calls += 1
        return (loss * math.nan if self._calls == self._spoiled_call else loss), reported


def train_with_a_spoiled_step(folder: str) -> list[tuple[list[float], Trace, Trace]]:
    """Per mode the norms of steps of which the second is spoiled on rank 1, and two runs that must be the
    same: with it, and without any second step.
    """
    process, variant, found = rank_process(), Variant(CLIPPED, 2), []
    for mode in MODES:
        # Two micro-batches a step: the fourth call is the last of the second step.
        loss = SpoiledLoss(259, 4 if process.rank == 1 else None)
        spoiled, straight = (
            Trainer(folder, process, mode, variant, loss),
            Trainer(folder, process, mode, variant),
        )
        norms = [norm for _, norm in spoiled.run([0, 1, 2])]
        others = [norm for _, norm in straight.run([0, 2])]
        found.append(
            (
                norms,
                Trace([(0.0, norms[0]), (0.0, norms[2])], weights_of(spoiled.model), spoiled.state()),
                Trace([(0.0, norm) for norm in others], weights_of(straight.model), straight.state()),
            )
        )
        for trainer in (spoiled, straight):
            trainer.optimizer.close()
    return found


def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(tiny_llama: Path) -> None:
    for of_rank in run_ranks(train_with_a_spoiled_step, 2, str(tiny_llama)):
        for norms, spoiled, straight in of_rank:
            assert [math.isfinite(norm) for norm in norms] == [True, False, True]
            assert spoiled.values == straight.values
            assert difference(spoiled.weights, straight.weights) == 0.0
            assert difference(spoiled.state, straight.state) == 0.0


def load_from(source: Trainer, target: Trainer) -> None:
    """What a checkpoint carries from one run to another with the same ranks."""
    for saved, part in (
        ({**source.model.logical_state(), **source.optimizer.weights()}, "model"),
        (source.optimizer.tensors(), "optimizer"),
    ):
        if part == "model":
            wanted = {**target.model.logical_state(), **target.optimizer.weights()}
        else:
            wanted = target.optimizer.tensors_to_load(saved.keys())
        assert wanted.keys() == saved.keys()
        for name, item in wanted.items():
            assert item.dtype == saved[name].dtype
            for mine, theirs in zip(item.pieces, saved[name].pieces, strict=True):
                assert mine.offsets == theirs.offsets
                mine.tensor.copy_(theirs.tensor)
    target.optimizer.weights_loaded()
    target.optimizer.loaded(source.optimizer.values())


def resume_everywhere(folder: str) -> dict[str, tuple[list[Any], list[Any]]]:
    """By the modes before and after: steps 4 to 6 of a run in one go, and after a change of the mode."""
    process, found = rank_process(), {}
    for before in MODES:
        first = Trainer(folder, process, before, Variant(CLIPPED, 2))
        first.run(range(3))
        resumed = {mode: Trainer(folder, process, mode, Variant(CLIPPED, 2)) for mode in MODES}
        for trainer in resumed.values():
            load_from(first, trainer)
        straight = first.run(range(3, 6))
        for after, trainer in resumed.items():
            found[f"{before} to {after}"] = (straight, trainer.run(range(3, 6)))
        for trainer in (first, *resumed.values()):
            trainer.optimizer.close()
    return found


def test_a_run_goes_on_in_any_other_mode(tiny_llama: Path) -> None:
    for of_rank in run_ranks(resume_everywhere, 2, str(tiny_llama)):
        assert len(of_rank) == 9
        for straight, resumed in of_rank.values():
            for mine, theirs in zip(resumed, straight, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)


def test_weights_loaded_without_the_optimizer_stay_as_they_are_at_a_learning_rate_of_zero(
    tiny_llama: Path, process: Process
) -> None:
    still = Variant(AdamWConfig(lr=0.0, max_grad_norm=MAX_NORM), 2)
    source = Trainer(str(tiny_llama), process, "none", Variant(CLIPPED, 2))
    target = Trainer(str(tiny_llama), process, "full", still)
    untouched = weights_of(target.model)
    source.run(range(2))
    wanted = weights_of(source.model)
    assert difference(untouched, wanted) > 1e-4
    for name, item in target.optimizer.weights().items():
        item.pieces[0].tensor.copy_(torch.from_numpy(wanted[name]))
    target.optimizer.weights_loaded()
    target.run(range(2))
    assert difference(weights_of(target.model), wanted) == 0.0
    masters = {name: item.pieces[0].tensor.numpy() for name, item in target.optimizer.weights().items()}
    assert difference(masters, wanted) == 0.0
    target.optimizer.close()


def test_in_bfloat16_full_offload_keeps_float32_weights_and_computes_the_same(
    tiny_llama: Path, process: Process
) -> None:
    exact = weights_of(build_sharded(tiny_llama, process))
    fresh = Trainer(str(tiny_llama), process, "full", Variant(CLIPPED, 2), dtype=torch.bfloat16)
    for name, item in fresh.optimizer.weights().items():
        assert torch.equal(item.pieces[0].tensor, torch.from_numpy(exact[name]))
    fresh.optimizer.close()
    for section in (CLIPPED, EARLY):
        plain, full = (
            train(str(tiny_llama), process, mode, Variant(section, 2), dtype=torch.bfloat16)
            for mode in ("none", "full")
        )
        # The same sums in the same types; only the reduction of the norm is of another precision.
        for mine, theirs in zip(full.values, plain.values, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        assert difference(full.state, plain.state) <= 1e-5
        # The copies on the device are rounded, the weights of the plain run are not.
        assert 1e-4 < difference(full.weights, plain.weights) < 1e-2
