"""What learns: the sharded model, its optimizer, and the engine over both. Of every kind of training."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from contract.model_files import ModelSource
from trainer.config import TrainConfig
from trainer.engine import Engine
from trainer.model.build import build_model
from trainer.model.causal_lm import CausalLM
from trainer.objective.base import Objective
from trainer.optimizer.base import Optimizer
from trainer.optimizer.factory import build_optimizer
from trainer.parallel.mesh import build_mesh
from trainer.parallel.process import Process
from trainer.parallel.shard import shard_model
from trainer.parts import ModelPart

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Learner:
    """The model and what trains it.

    Attributes:
        weights: under their Hugging Face names and in float32, wherever they are kept.
    """

    model: CausalLM
    optimizer: Optimizer
    engine: Engine
    weights: ModelPart


def build_learner(
    config: TrainConfig,
    process: Process,
    files: ModelSource,
    build_objective: Callable[[int], Objective],
    stack: ExitStack,
) -> Learner:
    """The model of `files` with its weights, sharded, and what trains it.

    Args:
        build_objective: of the size of the vocabulary.
        stack: takes what must be closed.
    """
    model = _build_model(config, process, files)
    optimizer = build_optimizer(
        config.optimizer,
        model.run_parameters(),
        block_parameters=model.block_parameters(),
        offload=config.model.offload,
        chunk_bytes=int(config.offload.chunk_mib * 2**20),
        process=process,
    )
    stack.push(_closing(optimizer))
    model.masters.clear()  # the optimizer has copied them
    engine = Engine(
        model,
        optimizer,
        build_objective(model.vocab_size),
        process.device,
        is_varlen=config.model.attention == "varlen",
        max_grad_norm=config.optimizer.max_grad_norm,
    )
    return Learner(model, optimizer, engine, ModelPart(model, optimizer))


def _build_model(config: TrainConfig, process: Process, files: ModelSource) -> CausalLM:
    device = process.device
    compute_dtype = device.compute_dtype(config.model.compute_dtype)
    if compute_dtype is torch.bfloat16 and device.kind == "cpu" and process.is_main:
        logger.warning(
            "model.compute_dtype = 'bfloat16' on a CPU: often over twenty times slower than float32"
        )
    shard = functools.partial(
        shard_model,
        mesh=build_mesh(process, config.deployment.dp_replicate),
        compute_dtype=compute_dtype,
        reduce_dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.reduce_dtype],
        reshard_after_forward=config.model.reshard_after_forward,
    )
    return build_model(
        config.model,
        files,
        device.torch_device,
        shard,
        seed=config.seed,
        compute_dtype=compute_dtype,
    )


def _closing(optimizer: Optimizer) -> Callable[[Any, BaseException | None, Any], None]:
    """An exit callback that closes `optimizer`, and does not hide the error that ends the run behind its
    own.
    """

    def close(kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            optimizer.close()
        except Exception as own:
            if error is None:
                raise
            logger.error("%s", own)

    return close
