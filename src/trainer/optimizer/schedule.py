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

    Warm-up: update n of `warmup_steps` uses n / warmup_steps. All updates of the decay are below the peak,
    and the last one is at `min_lr_ratio`; where the decay is the whole run, its first update is at the peak.

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
    floor, decay_start = config.min_lr_ratio, total_steps - (decay_steps or total_steps - warmup)
    is_cosine = isinstance(config, CosineScheduleConfig)
    # Without anything before the decay the first update has to be the one at the peak.
    last_at_peak = max(1, decay_start)

    def factor(n: int) -> float:
        n = min(n, total_steps)
        if n <= warmup:
            return n / warmup
        if n <= last_at_peak:
            return 1.0
        progress = (n - last_at_peak) / (total_steps - last_at_peak)
        shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if is_cosine else 1.0 - progress
        return floor + (1.0 - floor) * shape

    return factor
