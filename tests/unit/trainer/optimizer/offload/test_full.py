"""Full offload over plain parameters, against torch's optimizers on the same parameters."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from contract.errors import CheckpointError, ModelError
from trainer.config.optimizer import AdamWConfig, OptimizerConfig, SGDConfig, SignSGDConfig
from trainer.hold import Hold
from trainer.optimizer.base import Optimizer
from trainer.optimizer.factory import build_optimizer, list_groups
from trainer.optimizer.offload.optimizer import FullOffloadOptimizer
from trainer.parallel.layout import ModelParameter, Placement
from trainer.parallel.process import Process

SHAPES = {"first.weight": (5, 4), "second.weight": (6, 4), "norm.weight": (4,), "unused.weight": (3, 4)}
CHUNK_BYTES = 7 * 4  # seven elements: every matrix is cut, and chunks join the ends of matrices
EARLY: dict[str, Any] = {"max_grad_norm": None, "on_non_finite": "stop"}
CONFIGS: list[OptimizerConfig] = [
    AdamWConfig(lr=0.1, weight_decay=0.1),
    SGDConfig(lr=0.1, momentum=0.9, nesterov=True),
    SGDConfig(lr=0.1),
    SignSGDConfig(lr=0.1),
]
Named = dict[str, nn.Parameter]


def random_tensor(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters() -> Named:
    return {
        name: nn.Parameter(random_tensor(seed, shape)) for seed, (name, shape) in enumerate(SHAPES.items())
    }


def as_model(named: Mapping[str, nn.Parameter]) -> dict[str, ModelParameter]:
    return {name: ModelParameter(item, Placement.of(name, item)) for name, item in named.items()}


@pytest.fixture
def build(process: Process) -> Iterator[Callable[..., FullOffloadOptimizer]]:
    """Builds optimizers that are closed after the test."""
    opened: list[FullOffloadOptimizer] = []

    def build(config: OptimizerConfig, named: Named) -> FullOffloadOptimizer:
        optimizer = build_optimizer(
            config,
            as_model(named),
            block_parameters=(),
            offload="full",
            chunk_bytes=CHUNK_BYTES,
            process=process,
        )
        assert isinstance(optimizer, FullOffloadOptimizer)
        opened.append(optimizer)
        return optimizer

    yield build
    for optimizer in opened:
        optimizer.close()


def backward(named: Named, seed: int, names: Iterable[str]) -> None:
    """Give each of `names` a gradient that only `seed` decides."""
    terms = [
        (named[name] * random_tensor(100 * seed + place, SHAPES[name])).sum()
        for place, name in enumerate(SHAPES)
        if name in names
    ]
    torch.stack(terms).sum().backward()


# What each of three updates gets: the gradients of its micro-batches. The norm has none in the first update,
# and in the second none in the last micro-batch; `second` has none in the third.
UPDATES = [
    [("first.weight", "second.weight")],
    [("first.weight", "second.weight", "norm.weight"), ("second.weight",)],
    [("first.weight",), ("first.weight",), ("first.weight", "norm.weight")],
]


def run_update(named: Named, optimizer: Optimizer, step: int, grad_scale: float = 1.0) -> float:
    micro_batches = UPDATES[step]
    for index, names in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        optimizer.before_backward(1.0 / (step + 1) if is_last else None)
        backward(named, 10 * step + index, names)
    norm = optimizer.grad_norm()
    optimizer.step(1.0 / (step + 1), grad_scale)
    optimizer.zero_grad()
    return norm


def reference(config: OptimizerConfig, grad_scale: float) -> tuple[Named, list[float], dict[str, Any]]:
    """The same updates by torch alone: weights, norms, and state by name."""
    named = parameters()
    groups = list_groups(config, as_model(named), block_parameters=())
    optimizers = [group.build([named[name] for name in group.parameters]) for group in groups]
    norms = []
    for step, micro_batches in enumerate(UPDATES):
        for index, names in enumerate(micro_batches):
            backward(named, 10 * step + index, names)
        found = [item.grad for item in named.values() if item.grad is not None]
        norms.append(sum(float(item.double().square().sum()) for item in found) ** 0.5)
        for item in found:
            item.mul_(grad_scale)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = config.lr / (step + 1)
            optimizer.step()
            optimizer.zero_grad()
    state = {
        f"{name}.{key}": item
        for name, parameter in named.items()
        for optimizer in optimizers
        for key, item in optimizer.state.get(parameter, {}).items()
        if item is not None
    }
    return named, norms, state


def values_of(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Of logical tensors that are one piece each."""
    return {name: item.pieces[0].tensor.clone() for name, item in tensors.items()}


def check_same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, item in left.items():
        torch.testing.assert_close(item.detach(), right[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("is_early", [False, True], ids=["after backward", "in backward"])
@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "momentum", "sgd", "signsgd"])
def test_updates_norms_and_state_are_those_of_torch(
    config: OptimizerConfig, is_early: bool, build: Callable[..., FullOffloadOptimizer]
) -> None:
    grad_scale = 1.0 if is_early else 0.5
    named = parameters()
    optimizer = build(config.model_copy(update=EARLY) if is_early else config, named)
    norms = [run_update(named, optimizer, step, grad_scale) for step in range(len(UPDATES))]
    weights, expected_norms, state = reference(config, grad_scale)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    check_same(named, weights)
    check_same(values_of(optimizer.weights()), weights)
    check_same(values_of(optimizer.tensors()), state)
    assert not any(name.startswith("unused") for name in optimizer.tensors())


def test_gradients_leave_the_device_at_once_and_weights_change_only_in_the_update(
    build: Callable[..., FullOffloadOptimizer],
) -> None:
    named = parameters()
    optimizer = build(AdamWConfig(lr=0.1), named)
    before = {name: item.detach().clone() for name, item in named.items()}
    optimizer.before_backward(1.0)
    backward(named, 0, SHAPES)
    optimizer.grad_norm()
    assert all(item.grad is None for item in named.values())
    check_same(named, before)
    optimizer.step(1.0, 1.0)
    assert all((item != before[name]).all() for name, item in named.items())
    for name, item in optimizer.weights().items():
        assert item.pieces[0].tensor.data_ptr() != named[name].data_ptr()


def test_an_early_update_is_made_in_the_last_backward_and_in_no_other(
    build: Callable[..., FullOffloadOptimizer],
) -> None:
    named = parameters()
    optimizer = build(AdamWConfig(lr=0.1, **EARLY), named)
    before = {name: item.detach().clone() for name, item in named.items()}
    optimizer.before_backward(None)
    backward(named, 0, SHAPES)
    optimizer.grad_norm()  # waits for the worker
    check_same(named, before)
    optimizer.zero_grad()
    optimizer.before_backward(1.0)
    backward(named, 0, SHAPES)
    deadline = time.monotonic() + 30
    while not all((item != before[name]).all() for name, item in named.items()):
        assert time.monotonic() < deadline, "backward is over, and some weights are not updated"
        time.sleep(0.001)


def test_a_skipped_update_leaves_weights_state_counters_and_options_alone(
    build: Callable[..., FullOffloadOptimizer],
) -> None:
    named, again = parameters(), parameters()
    optimizer, straight = build(AdamWConfig(lr=0.1), named), build(AdamWConfig(lr=0.1), again)
    run_update(named, optimizer, 0)
    run_update(again, straight, 0)
    optimizer.before_backward(0.5)
    (named["first.weight"] * float("nan")).sum().backward()
    assert optimizer.grad_norm() != optimizer.grad_norm()  # NaN
    optimizer.zero_grad()
    check_same(values_of(optimizer.tensors()), values_of(straight.tensors()))
    check_same(named, again)
    for step in (1, 2):
        assert run_update(named, optimizer, step) == run_update(again, straight, step)
    check_same(named, again)
    check_same(values_of(optimizer.tensors()), values_of(straight.tensors()))


@pytest.mark.parametrize("is_early", [False, True], ids=["after backward", "in backward"])
def test_a_gradient_in_several_parts_is_added_up_or_refused(
    is_early: bool, build: Callable[..., FullOffloadOptimizer]
) -> None:
    named = parameters()
    optimizer = build(AdamWConfig(lr=0.1, **(EARLY if is_early else {})), named)
    optimizer.before_backward(1.0)
    backward(named, 0, SHAPES)
    if is_early:
        with pytest.raises(
            ModelError, match=r"norm.weight gets its gradient in several parts .* 'optimizer'"
        ):
            backward(named, 1, ["norm.weight"])
        return
    backward(named, 1, SHAPES)
    norm = optimizer.grad_norm()
    parts = [
        random_tensor(place, shape) + random_tensor(100 + place, shape)
        for place, shape in enumerate(SHAPES.values())
    ]
    assert norm == pytest.approx(sum(float(item.square().sum()) for item in parts) ** 0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "after backward, because optimizer.max_grad_norm = 1 needs the norm of the whole gradient"),
        ({"max_grad_norm": None}, "after backward, because optimizer.on_non_finite = 'skip' has to see"),
        (EARLY, "while the last backward of a step still runs"),
    ],
)
def test_when_updates_are_made_is_said_once_with_the_reason(
    changes: dict[str, Any],
    said: str,
    build: Callable[..., FullOffloadOptimizer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        named = parameters()
        optimizer = build(AdamWConfig(lr=0.1, **changes), named)
        run_update(named, optimizer, 0)
    (message,) = [record.getMessage() for record in caplog.records]
    assert said in message


class WatchedHold(Hold):
    """A hold that keeps what the memory it was asked for held at that moment.

    Args:
        error: raised instead, at the third question.
    """

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__([], buffer=None, timeout_seconds=30)
        self.asked: dict[int, torch.Tensor] = {}
        self.threads: set[str] = set()
        self._error = error
        self._num_questions = 0

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        self._num_questions += 1
        self.threads.add(threading.current_thread().name)
        if self._error is not None and self._num_questions == 3:
            raise self._error
        for tensor in tensors:
            for index, value in enumerate(tensor.clone()):
                self.asked[tensor.data_ptr() + 4 * index] = value


@pytest.mark.parametrize("is_early", [False, True], ids=["after backward", "in backward"])
def test_the_hold_is_asked_for_all_weights_and_state_before_any_changes(
    is_early: bool, build: Callable[..., FullOffloadOptimizer]
) -> None:
    named = parameters()
    optimizer = build(AdamWConfig(lr=0.1, **(EARLY if is_early else {})), named)
    run_update(named, optimizer, 0)
    held = {
        name: item
        for name, item in (optimizer.weights() | optimizer.tensors()).items()
        if item.residence == "host" and name.startswith(("first", "second"))
    }
    assert len(held) == 6  # two matrices, each with two moments
    before = {
        name: (item.pieces[0].tensor.data_ptr(), item.pieces[0].tensor.clone()) for name, item in held.items()
    }
    hold = WatchedHold()
    optimizer.hold_state_updates(hold)
    run_update(named, optimizer, 1)
    for start, values in before.values():
        for index, value in enumerate(values.flatten()):
            assert hold.asked[start + 4 * index] == value
    assert hold.threads == {"the host's side of full offload"}


@pytest.mark.parametrize("call", ["grad_norm", "step", "zero_grad", "close"])
def test_an_error_on_the_worker_reaches_the_training_thread_and_ends_the_worker(
    call: str, process: Process
) -> None:
    named = parameters()
    config = AdamWConfig(lr=0.1, **EARLY)
    groups = list_groups(config, as_model(named), block_parameters=())
    optimizer = FullOffloadOptimizer(
        as_model(named), groups, chunk_bytes=CHUNK_BYTES, process=process, is_early=True
    )
    optimizer.hold_state_updates(WatchedHold(CheckpointError("the storage hangs")))
    optimizer.before_backward(1.0)
    worker = next(item for item in threading.enumerate() if item.name == "the host's side of full offload")
    with pytest.raises(CheckpointError, match="the storage hangs"):
        # Backward meets it already if the worker is quick; so must all that follows.
        with contextlib.suppress(CheckpointError):
            backward(named, 0, SHAPES)
        worker.join(30)
        {
            "grad_norm": optimizer.grad_norm,
            "step": lambda: optimizer.step(1.0, 1.0),
            "zero_grad": optimizer.zero_grad,
            "close": lambda: (optimizer.close(), optimizer.zero_grad()),
        }[call]()
    optimizer.close()
    assert not worker.is_alive()


def test_state_and_options_saved_and_loaded_go_on_as_if_there_had_been_no_end(
    build: Callable[..., FullOffloadOptimizer],
) -> None:
    for config in CONFIGS:
        named = parameters()
        first = build(config, named)
        for step in (0, 1):
            run_update(named, first, step)
        saved, values = values_of(first.tensors()), json.loads(json.dumps(first.values()))
        moved = {name: nn.Parameter(item.detach().clone()) for name, item in named.items()}
        second = build(config, moved)
        for name, item in second.tensors_to_load(saved.keys()).items():
            item.pieces[0].tensor.copy_(saved[name])
        second.loaded(values)
        run_update(named, first, 2)
        run_update(moved, second, 2)
        check_same(moved, named)
        check_same(values_of(second.tensors()), values_of(first.tensors()))
        assert second.values() == first.values()
        values["groups"]["decay"]["peak_lr"] = 0.05  # as a run may have changed it
        third = build(config, parameters())
        third.loaded(values)
        assert third.values() == values


def test_loaded_weights_reach_the_device_and_stay_as_they_are_without_a_learning_rate(
    build: Callable[..., FullOffloadOptimizer],
) -> None:
    named = parameters()
    optimizer = build(AdamWConfig(lr=0.0), named)
    loaded = {name: random_tensor(77 + seed, shape) for seed, (name, shape) in enumerate(SHAPES.items())}
    for name, item in optimizer.weights().items():
        item.pieces[0].tensor.copy_(loaded[name])
    optimizer.weights_loaded()
    for step in range(len(UPDATES)):
        run_update(named, optimizer, step)
    for name, item in named.items():
        assert torch.equal(item, loaded[name])
        assert torch.equal(optimizer.weights()[name].pieces[0].tensor, loaded[name])
