"""Weights in Hugging Face format, every few steps and at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from trainer.config.checkpoint import ExportConfig
from trainer.hooks.base import BaseHook
from trainer.model.causal_lm import CausalLM
from trainer.model.export import export_weights
from trainer.parallel.process import Process
from trainer.state import TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class ExportHook(BaseHook):
    """Writes `weights/step_N`; a step that is there already is left as it is."""

    def __init__(
        self,
        config: ExportConfig,
        process: Process,
        folder: Path,
        source_folder: Path,
        model: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._config = config
        self._process = process
        self._folder = folder
        self._source_folder = source_folder
        self._model = model
        self._tokenizer = tokenizer

    def after_step(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        interval = self._config.interval
        return self._export(state.step) if interval is not None and state.step % interval == 0 else {}

    def finish(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        return self._export(state.step)

    def _export(self, step: int) -> Mapping[str, float]:
        target = self._folder / f"step_{step}"
        exists = self._process.is_main and target.is_dir()
        if self._process.all_max(float(exists)):
            return {}
        start = time.perf_counter()
        tensors: dict[str, torch.Tensor] = {}
        for name, item in self._model.logical_state().items():
            # All ranks gather, one keeps: a full copy of the model is on the host of rank 0 only.
            whole = item.full_tensor().detach() if isinstance(item, DTensor) else item.detach()
            if self._process.is_main:
                tensors[name] = whole.cpu()
        if self._process.is_main:
            export_weights(
                tensors,
                source_folder=self._source_folder,
                target=target,
                dtype=self._config.dtype,
                max_shard_size=self._config.max_shard_size,
                tokenizer=self._tokenizer,
            )
            logger.info("step %d: exported to %s", step, target)
        self._process.barrier()
        return {"time/export": time.perf_counter() - start}
