"""What the start-up summary says of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from contract.layout import RunFolder
from contract.model_files import ModelSource
from telemetry.flops import known_peak_tflops
from telemetry.memory import (
    MemoryEstimate,
    estimate_activation_memory,
    estimate_training_memory,
    format_bytes,
)
from trainer.checkpoint.resume import ResumePlan
from trainer.config import TrainConfig
from trainer.config.optimizer import AdamWConfig, MuonConfig, SGDConfig
from trainer.feed import Feed
from trainer.model.build import ModelShape
from trainer.objective.logprob import LOGITS_BYTES
from trainer.parallel.process import Process
from trainer.reporter import Peak
from trainer.source.base import Source

_OFFLOAD_WORDS = {
    "none": "",
    "optimizer": ", optimizer on the host",
    "full": ", both on the host, where the update runs",
}

Sections = dict[str, Mapping[str, str]]


def find_peak(config: TrainConfig, process: Process) -> Peak:
    """The peak that MFU is measured against: as configured, known of the GPU, or measured now."""
    if config.log.peak_tflops is not None:
        return Peak(config.log.peak_tflops, "log.peak_tflops")
    dtype = process.device.compute_dtype(config.model.compute_dtype)
    known = known_peak_tflops(process.device.name)
    if known is not None and dtype is torch.bfloat16:
        return Peak(known, "data sheet")
    # All ranks at once: processes that share a CPU also share its peak.
    process.barrier()
    measured = process.device.measure_peak_tflops(dtype)
    mean = process.all_sum([measured])[0] / process.world_size
    return Peak(mean, f"measured {str(dtype).removeprefix('torch.')} matrix product")


def start_summary(
    config: TrainConfig,
    process: Process,
    shape: ModelShape,
    files: ModelSource,
    feed: Feed[Source],
    peak: Peak,
    folder: RunFolder,
    plan: ResumePlan | None,
    total_steps: int,
) -> Sections:
    """Sections of title and value, in the order in which they are shown."""
    sections: Sections = {
        "run": {"folder": str(folder.root), "steps": f"{total_steps:,}", "seed": str(config.seed)},
        "model": _model_rows(config, shape, files),
        "processes": _process_rows(config, process, peak),
        "data": feed.rows,
        "optimizer": _optimizer_rows(config),
        "checkpoints": _checkpoint_rows(config),
        "memory (estimate)": _memory_rows(config, process, shape, feed),
    }
    if plan is not None:
        sections["resume"] = {str(number): line for number, line in enumerate(plan.lines(), 1)}
    return sections


def _model_rows(config: TrainConfig, shape: ModelShape, files: ModelSource) -> dict[str, str]:
    rows = {
        "name": files.name,
        "parameters": f"{shape.num_parameters:,}{' (tied embeddings)' if shape.is_tied else ''}",
        "attention": config.model.attention,
    }
    if config.model.init == "random":
        rows["weights"] = "random"
    if config.model.activation_checkpointing != "none":
        rows["activation checkpointing"] = config.model.activation_checkpointing
    if config.model.fusions:
        by = "input features" if config.model.shard_fused_on_dim1 else "rows"
        rows["fused projections"] = f"{', '.join(config.model.fusions)} (sharded by {by})"
    if config.model.compile:
        rows["compile"] = "each block"
    return rows


def _process_rows(config: TrainConfig, process: Process, peak: Peak) -> dict[str, str]:
    replicate = config.deployment.dp_replicate
    dtype = process.device.compute_dtype(config.model.compute_dtype)
    return {
        "ranks": f"{process.world_size} (mesh: {replicate} replicas x {process.world_size // replicate} "
        f"shards)",
        "device": f"{process.device.name}, {process.device.backend}",
        "compute": f"{str(dtype).removeprefix('torch.')}, weights and optimizer float32"
        f"{_OFFLOAD_WORDS[config.model.offload]}",
        "peak for MFU": f"{peak.tflops:.3g} TFLOP/s per rank ({peak.origin})",
    }


def _optimizer_rows(config: TrainConfig) -> dict[str, str]:
    optimizer, schedule = config.optimizer, config.schedule
    clip = "off" if optimizer.max_grad_norm is None else f"{optimizer.max_grad_norm:g}"
    warmup = f", {schedule.warmup_steps} warm-up steps" if schedule.warmup_steps else ""
    return {
        "type": f"{optimizer.type}, lr {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}, clip "
        f"{clip}",
        "schedule": f"{schedule.type}{warmup}",
    }


def _checkpoint_rows(config: TrainConfig) -> dict[str, str]:
    if config.ckpt is None:
        rows = {"save": "never (--no-ckpt)"}
    else:
        every = f"every {config.ckpt.interval} steps and " if config.ckpt.interval else ""
        keep = "keeps all"
        if config.ckpt.keep_last is not None:
            keep = f"keeps the last {config.ckpt.keep_last}"
            keep += f" and every {config.ckpt.keep_interval}th" if config.ckpt.keep_interval else ""
        rows = {"save": f"{every}at the end, {keep}"}
        if config.ckpt.url is not None:
            rows["store"] = config.ckpt.url
        if config.ckpt.async_save and config.model.offload != "none":
            rows["save"] += ", behind the training step"
    if config.export is not None:
        every = f"every {config.export.interval} steps and " if config.export.interval else ""
        rows["export"] = f"{every}at the end"
    return rows


def _memory_rows(
    config: TrainConfig, process: Process, shape: ModelShape, feed: Feed[Source]
) -> dict[str, str]:
    optimizer = config.optimizer
    state_bytes = 0.0
    if isinstance(optimizer, AdamWConfig):
        state_bytes = 8
    elif isinstance(optimizer, MuonConfig):
        # One buffer for the blocks' matrices, two moments for the rest.
        rest = (shape.num_parameters - shape.num_block_parameters) / shape.num_parameters
        state_bytes = 4 + 4 * rest
    elif isinstance(optimizer, SGDConfig) and optimizer.momentum:
        state_bytes = 4
    dtype = process.device.compute_dtype(config.model.compute_dtype)
    num_tokens = feed.seq_len * feed.rows_at_a_time
    activations = estimate_activation_memory(
        num_tokens=min(num_tokens, LOGITS_BYTES // (4 * shape.vocab_size)),
        hidden_size=0,
        num_layers=0,
        vocab_size=shape.vocab_size,
        compute_bytes=dtype.itemsize,
        checkpointing=False,
    ) + estimate_activation_memory(
        num_tokens=num_tokens,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        vocab_size=0,
        compute_bytes=dtype.itemsize,
        checkpointing=config.model.activation_checkpointing != "none",
    )
    estimate = estimate_training_memory(
        num_parameters=shape.num_parameters,
        shards=process.world_size // config.deployment.dp_replicate,
        optimizer_bytes_per_parameter=state_bytes,
        gathered_parameters=shape.num_gathered_parameters(config.model.reshard_after_forward),
        compute_bytes=dtype.itemsize,
        activation_bytes=activations,
    )
    rows = _split_memory(config, estimate, dtype)
    total = process.device.total_memory_bytes()
    if total is not None:
        rows["device"] = f"{total / 2**30:.1f} GiB"
    return rows


def _split_memory(
    config: TrainConfig, estimate: MemoryEstimate, compute_dtype: torch.dtype
) -> dict[str, str]:
    """What of the estimate is on the device, and what offload keeps on the host."""
    if config.model.offload == "none":
        return estimate.summary()
    on_host = {"optimizer": estimate.optimizer}
    left = replace(estimate, optimizer=0)
    if config.model.offload == "full":
        on_host |= {"float32 weights": estimate.weights, "gradients": estimate.gradients}
        # A unit's gradient is on the device until it is reduced, which `gathered` covers.
        left = replace(left, weights=estimate.weights // 4 * compute_dtype.itemsize, gradients=0)
    rows = left.summary()
    rows["also on the host"] = f"{format_bytes(sum(on_host.values()))} ({', '.join(on_host)})"
    if config.ckpt is not None and config.ckpt.async_save and config.model.offload == "optimizer":
        rows["also for a save"] = f"{format_bytes(estimate.weights)} on the host (a copy of the weights)"
    return rows
