"""Learning-rate schedules: pure functions from the number of an update to a factor of the peak."""

from __future__ import annotations

import math
from collections.abc import Callable

from contract.errors import ConfigError
from trainer.config.optimizer import ConstantScheduleConfig, CosineScheduleConfig, LinearScheduleConfig

Schedule = Callable[[int], float]
"""Factor of the peak learning rate for update n, counted from 1."""


def build_schedule(
    config: ConstantScheduleConfig | LinearScheduleConfig | CosineScheduleConfig, total_steps: int
) -> Schedule:
    """The schedule of a run of `total_steps` updates; beyond them the last value holds.

    Warm-up: update n of `warmup_steps` uses n / warmup_steps. The decay reaches `min_lr_ratio` with the last
    update.

    Raises:
        ConfigError: warm-up and decay do not fit into the run.
    """
    warmup = config.warmup_steps
    decay_steps = (config.decay_steps or 0) if isinstance(config, LinearScheduleConfig) else 0
    if warmup + decay_steps > total_steps:
        raise ConfigError(
            f"schedule.warmup_steps = {warmup} and schedule.decay_steps = {decay_steps} do not fit into the "
            f"{total_steps} updates of this run; lower them"
        )
    if isinstance(config, ConstantScheduleConfig):
        return lambda n: min(1.0, n / warmup) if warmup else 1.0
    length = decay_steps or total_steps - warmup
    floor, decay_start = config.min_lr_ratio, total_steps - length
    is_cosine = isinstance(config, CosineScheduleConfig)

    def factor(n: int) -> float:
        if n <= warmup:
            return n / warmup
        # The first update of the decay still uses the peak when the decay follows warm-up at once (length - 1
        # intervals).
        progress = min(1.0, max(0.0, (n - decay_start - 1) / max(1, length - 1)))
        shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if is_cosine else 1.0 - progress
        return floor + (1.0 - floor) * shape

    return factor
