"""Garbage collection at a fixed place in the step, and the profiler."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from trainer.hooks.base import BaseHook
from trainer.state import TrainState

logger = logging.getLogger(__name__)


class GarbageHook(BaseHook):
    """Collects garbage every `interval` steps on all ranks at once; otherwise each would stall the others in
    turn.
    """

    def __init__(self, interval: int = 50) -> None:
        self._interval = interval

    def before_training(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        gc.collect()
        gc.freeze()
        gc.disable()
        return {}

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        if state.step % self._interval == 0:
            gc.collect(1)
        return {}

    def close(self) -> None:
        """See `Hook`."""
        gc.enable()
        gc.unfreeze()


class ProfileHook(BaseHook):
    """Records `num_steps` steps from `start_step` on (counted in this process) as `step_N_rank_K.json`."""

    def __init__(self, folder: Path, rank: int, *, start_step: int, num_steps: int, with_stack: bool) -> None:
        self._folder = folder
        self._rank = rank
        self._first = start_step
        self._last = start_step + num_steps - 1
        self._with_stack = with_stack
        self._steps_done = 0
        self._profiler: torch.profiler.profile | None = None

    def before_training(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        self._start_if_due()
        return {}

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        self._steps_done += 1
        if self._profiler is not None and self._steps_done >= self._last:
            self._write(state.step)
        self._start_if_due()
        return {}

    def finish(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        if self._profiler is not None:
            self._write(state.step)
        elif self._steps_done < self._first:
            logger.warning(
                "no profiler trace: the run did %d steps, profiler.start_step = %d",
                self._steps_done,
                self._first,
            )
        return {}

    def close(self) -> None:
        """See `Hook`."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _start_if_due(self) -> None:
        if self._steps_done + 1 != self._first:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, with_stack=self._with_stack)
        self._profiler.start()

    def _write(self, step: int) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step}_rank_{self._rank}.json"
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        logger.info("profiler trace written to %s (open it at ui.perfetto.dev or chrome://tracing)", path)
