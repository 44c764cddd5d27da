"""What optimizers of every mode promise: state is saved, loaded into a new one, and goes on bit for bit."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from torch import nn

from contract.errors import CheckpointError
from tests.support.engine import whole
from tests.support.ranks import run_ranks
from tests.unit.trainer.optimizer.cases import (
    CONFIGS,
    MODES,
    SHAPES,
    UNUSED,
    Mode,
    build,
    copy_of,
    parameters,
    reload,
    update,
)
from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig, SignSGDConfig

in_every_mode = pytest.mark.parametrize("mode", MODES)


def go_on(config: OptimizerConfig, mode: Mode) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Weights after four updates in one go, and with a reload in the middle; names of the state."""
    named = parameters()
    optimizer = build(config, named, mode)
    update(named, optimizer, range(4))
    again = parameters()
    first = build(config, again, mode)
    update(again, first, range(2))
    moved = {name: nn.Parameter(copy_of(item)) for name, item in again.items()}
    second = reload(config, moved, first, mode)
    update(moved, second, range(2, 4))
    assert optimizer.values() == second.values()
    return (
        {name: whole(item) for name, item in named.items()},
        {name: whole(item) for name, item in moved.items()},
        sorted(second.tensors()),
    )


def check_equal(result: tuple[dict[str, Any], dict[str, Any], list[str]]) -> None:
    straight, resumed, names = result
    for name, item in straight.items():
        assert (item == resumed[name]).all(), name
    assert not any(name.startswith(UNUSED) for name in names)  # it never had a gradient


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
@in_every_mode
def test_a_reloaded_optimizer_goes_on_bit_for_bit(config: OptimizerConfig, mode: Mode) -> None:
    check_equal(go_on(config, mode))


def go_on_with_all(mode: Mode) -> list[tuple[dict[str, Any], dict[str, Any], list[str]]]:
    return [go_on(config, mode) for config in CONFIGS]


@in_every_mode
def test_sharded_state_goes_on_bit_for_bit_and_updates_equal_those_of_one_rank(mode: Mode) -> None:
    for of_rank in run_ranks(go_on_with_all, 2, mode):
        for config, result in zip(CONFIGS, of_rank, strict=True):
            check_equal(result)
            for name, item in go_on(config, mode)[0].items():
                # Muon's iteration multiplies bfloat16 matrices, whose sums a split orders differently.
                tolerance = 4e-3 if config.type == "muon" and "proj" in name else 1e-6
                assert abs(item - result[0][name]).max() <= tolerance, (config.type, name)


@in_every_mode
def test_state_has_the_names_of_parameters(mode: Mode) -> None:
    named = parameters()
    optimizer = build(AdamWConfig(), named, mode)
    assert optimizer.tensors() == {}
    update(named, optimizer, range(1))
    assert set(optimizer.tensors()) == {
        f"{name}.{key}" for name in SHAPES for key in ("step", "exp_avg", "exp_avg_sq")
    }


@in_every_mode
def test_the_options_of_every_group_survive_also_those_changed_while_training(mode: Mode) -> None:
    named = parameters()
    config = AdamWConfig(lr=0.1, weight_decay=0.3, betas=[0.7, 0.8])
    source = build(config, named, mode)
    update(named, source, range(2))
    values = json.loads(json.dumps(source.values()))
    values["groups"]["no_decay"]["options"]["weight_decay"] = 0.25
    values["groups"]["no_decay"]["peak_lr"] = 0.05
    optimizer = build(config, parameters(), mode)
    optimizer.loaded(values)
    assert optimizer.values() == values
    assert optimizer.values()["groups"]["decay"]["options"]["lr"] == pytest.approx(0.05)
    assert optimizer.values()["groups"]["decay"]["options"]["betas"] == [0.7, 0.8]
    optimizer.step(1.0, 1.0)
    live = {name: record["options"]["lr"] for name, record in optimizer.values()["groups"].items()}
    assert live == {"decay": 0.1, "no_decay": 0.05}


def test_a_changed_setting_wins_over_the_checkpoint_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    source = build(AdamWConfig(lr=0.1, weight_decay=0.1, eps=1e-6), parameters())
    optimizer = build(AdamWConfig(lr=0.2, weight_decay=0.1, eps=1e-6), parameters())
    with caplog.at_level(logging.WARNING):
        optimizer.loaded(json.loads(json.dumps(source.values())))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"optimizer group {group}: lr was 0.1 in the checkpoint; the configuration's 0.2 is used"
        for group in ("decay", "no_decay")
    ]
    optimizer.step(0.5, 1.0)
    assert optimizer.values()["groups"]["decay"]["options"]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (SGDConfig(momentum=0.9), r"decay \(SGD\), no_decay \(SGD\)"),
        (SignSGDConfig(), r"decay \(SignSGD\), no_decay \(SignSGD\)"),
        (MuonConfig(), r"muon_decay \(Muon\)"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(other: OptimizerConfig, named: str) -> None:
    values = build(other, parameters()).values()
    with pytest.raises(
        CheckpointError, match=named + r".*, this one decay \(AdamW\), no_decay \(AdamW\); keep"
    ):
        build(AdamWConfig(), parameters()).loaded(values)


@in_every_mode
def test_state_of_a_parameter_that_is_not_trained_is_refused(mode: Mode) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer state for 'layers.9.weight'"):
        build(AdamWConfig(), parameters(), mode).tensors_to_load(["layers.9.weight.exp_avg"])


@in_every_mode
def test_loading_forgets_the_state_there_was(mode: Mode) -> None:
    named = parameters()
    optimizer = build(AdamWConfig(), named, mode)
    update(named, optimizer, range(1))
    assert optimizer.tensors_to_load([]) == {} and optimizer.tensors() == {}
