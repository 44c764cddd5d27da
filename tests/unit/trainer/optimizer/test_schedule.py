"""Learning-rate factors, written out by hand."""

from __future__ import annotations

import math

import pytest

from contract.errors import ConfigError
from trainer.config.optimizer import ConstantScheduleConfig, CosineScheduleConfig, LinearScheduleConfig
from trainer.optimizer.schedule import build_schedule


@pytest.mark.parametrize(
    ("config", "total", "expected"),
    [
        (ConstantScheduleConfig(), 3, [1, 1, 1]),
        (ConstantScheduleConfig(warmup_steps=4), 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        (LinearScheduleConfig(), 5, [1, 0.75, 0.5, 0.25, 0]),
        (LinearScheduleConfig(min_lr_ratio=0.2), 5, [1, 0.8, 0.6, 0.4, 0.2]),
        (LinearScheduleConfig(warmup_steps=2, min_lr_ratio=0.1), 5, [0.5, 1, 0.7, 0.4, 0.1]),
        (
            LinearScheduleConfig(warmup_steps=2, decay_steps=4, min_lr_ratio=0.2),
            9,
            [0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2],
        ),
        (LinearScheduleConfig(decay_steps=1, min_lr_ratio=0.5), 3, [1, 1, 0.5]),
        (LinearScheduleConfig(decay_steps=3), 3, [1, 0.5, 0]),
        (LinearScheduleConfig(warmup_steps=2, decay_steps=2), 4, [0.5, 1, 0.5, 0]),
        (LinearScheduleConfig(warmup_steps=3), 3, [1 / 3, 2 / 3, 1]),
        (LinearScheduleConfig(), 1, [1]),
        (CosineScheduleConfig(), 5, [1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0]),
        (CosineScheduleConfig(warmup_steps=2, min_lr_ratio=0.2), 4, [0.5, 1, 0.6, 0.2]),
        (CosineScheduleConfig(), 1, [1]),
    ],
)
def test_every_update_has_the_factor_of_the_formula(
    config: object, total: int, expected: list[float]
) -> None:
    schedule = build_schedule(config, total)  # pyright: ignore[reportArgumentType]
    assert [schedule(n) for n in range(1, total + 1)] == pytest.approx(expected)
    # A run that is longer than its schedule stays where it ended.
    assert [schedule(total + extra) for extra in (1, 2, 50)] == pytest.approx([expected[-1]] * 3)


@pytest.mark.parametrize(
    "config",
    [
        ConstantScheduleConfig(warmup_steps=4),
        CosineScheduleConfig(warmup_steps=4),
        LinearScheduleConfig(warmup_steps=2, decay_steps=2),
    ],
)
def test_a_schedule_that_does_not_fit_into_the_run_is_refused(config: object) -> None:
    with pytest.raises(ConfigError, match="do not fit into the 3 updates of this run; lower them"):
        build_schedule(config, 3)  # pyright: ignore[reportArgumentType]
