"""Weights in Hugging Face format, every few steps and at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.config.checkpoint import ExportConfig
from trainer.hooks.base import BaseHook
from trainer.model.export import export_weights
from trainer.parallel.layout import LogicalTensor, gather
from trainer.parallel.process import Process
from trainer.state import TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class ExportHook(BaseHook):
    """Writes `weights/step_N` for steps that this process trained, over what another history left there; the
    step of a run that was complete already is written only if it is missing.
    """

    def __init__(
        self,
        config: ExportConfig,
        process: Process,
        folder: Path,
        source_folder: Path,
        weights: Callable[[], Mapping[str, LogicalTensor]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self._config = config
        self._process = process
        self._folder = folder
        self._source_folder = source_folder
        self._weights = weights
        self._tokenizer = tokenizer
        self._trust_remote_code = trust_remote_code
        self._exported_step: int | None = None
        self._has_trained = False

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        self._has_trained = True
        interval = self._config.interval
        return self._export(state.step) if interval is not None and state.step % interval == 0 else {}

    def finish(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        if not self._has_trained:
            exists = self._process.is_main and self._target(state.step).is_dir()
            if self._process.all_max(float(exists)):
                return {}
        return self._export(state.step)

    def _export(self, step: int) -> Mapping[str, float]:
        if step == self._exported_step:
            return {}
        target = self._target(step)
        start = time.perf_counter()
        tensors: dict[str, torch.Tensor] = {}
        for name, item in self._weights().items():
            # A full copy of the model is on the host of rank 0 only.
            whole = gather(item, self._process)
            if whole is not None:
                tensors[name] = whole
        if self._process.is_main:
            export_weights(
                tensors,
                source_folder=self._source_folder,
                target=target,
                dtype=self._config.dtype,
                max_shard_size=self._config.max_shard_size,
                tokenizer=self._tokenizer,
                trust_remote_code=self._trust_remote_code,
            )
            logger.info("step %d: exported to %s", step, target)
        self._process.barrier()
        self._exported_step = step
        return {"time/export": time.perf_counter() - start}

    def _target(self, step: int) -> Path:
        return self._folder / f"step_{step}"
