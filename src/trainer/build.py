"""The composition root: from a configuration to a loop that is ready to run. The only file that knows SFT
from RL.

Everything that must be closed goes onto one exit stack, which the caller closes in reverse order, also on an
error.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from rich.console import Console as RichConsole

from contract.errors import ModelError
from contract.layout import RunFolder
from contract.model_files import ModelSource, load_tokenizer, resolve_model
from telemetry.console import Console
from telemetry.log import terminal
from telemetry.metrics import JsonlSink, Metrics, MetricSink
from trainer.checkpoint.base import Part
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import ResumePlan, plan_resume
from trainer.config import SFTConfig
from trainer.config.data import ChatDataConfig
from trainer.engine import Engine
from trainer.hooks.build import build_hooks
from trainer.loop import Loop
from trainer.model.build import build_model, describe
from trainer.model.causal_lm import CausalLM
from trainer.objective.cross_entropy import CrossEntropy
from trainer.optimizer.base import Optimizer
from trainer.optimizer.factory import build_optimizer
from trainer.optimizer.schedule import build_schedule
from trainer.parallel.mesh import build_mesh
from trainer.parallel.process import Process
from trainer.parallel.shard import shard_model
from trainer.parallel.stop import Requests
from trainer.parts import DataPart, ModelPart, StatePart, TrackerPart
from trainer.reporter import StepReporter
from trainer.source.base import Source
from trainer.source.dataset import ChatSource
from trainer.source.fake import FakeSource
from trainer.source.prepare import default_cache_dir
from trainer.source.validation import ValidationRows
from trainer.state import TrainState
from trainer.summary import find_peak, start_summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is ready: `loop.fit()` trains."""

    loop: Loop
    state: TrainState
    console: Console
    reporter: StepReporter
    total_steps: int
    start_time: float

    def seconds(self) -> float:
        """Since the process began to build the run."""
        return time.monotonic() - self.start_time


@dataclass(frozen=True, slots=True)
class _Data:
    source: Source
    validation: ValidationRows | None
    tokenizer: PreTrainedTokenizerBase


def build_sft(
    config: SFTConfig, process: Process, requests: Requests, folder: RunFolder, attempt: int, stack: ExitStack
) -> Run:
    """Everything of an SFT run, resumed if `config.resume` says so.

    Args:
        stack: takes what must be closed.
    """
    start_time = time.monotonic()
    seed_everything(config.seed + process.rank)
    # Before anything slow: a resume that cannot work is refused at once.
    plan = _plan_resume(config, process, folder)
    files = _first_on_each_machine(process, lambda: resolve_model(config.model))
    console = stack.enter_context(_open_console(config, process))
    data = _first_on_each_machine(process, lambda: _open_data(config, process, files))
    _warn_of_micro_batch(config, process)

    model = _build_model(config, process, files)
    shape = describe(model)
    engine, optimizer = _build_engine(config, process, model)
    stack.push(_closing(optimizer))
    _check_sizes(config, model, data.tokenizer)

    state, tracker = TrainState(), TrackerPart()
    weights = ModelPart(model, optimizer)
    parts = _list_parts(weights, optimizer, state, data.source, tracker)
    checkpoint = stack.enter_context(_open_checkpoint(config, process, folder, parts, model, optimizer))
    _resume(checkpoint, plan, folder, tracker)
    total_steps = config.max_steps or state.step + (data.source.steps_left or 0)
    peak = find_peak(config, process)
    metrics = stack.enter_context(_open_metrics(config, process, folder, attempt, tracker, state))
    reporter = StepReporter(
        process, metrics, console, shape, peak, peak_lr=config.optimizer.lr, total_steps=total_steps
    )
    tokenizer, validation = data.tokenizer, data.validation
    hooks = build_hooks(
        config, process, requests, folder, files, weights.tensors, engine, console, tokenizer, validation
    )
    for hook in hooks:
        stack.callback(hook.close)
    schedule = build_schedule(config.schedule, _schedule_steps(config, state, total_steps, plan))
    loop = Loop(
        process=process,
        engine=engine,
        source=data.source,
        checkpoint=checkpoint,
        hooks=hooks,
        reporter=reporter,
        requests=requests,
        state=state,
        schedule=schedule,
        total_steps=total_steps,
        on_non_finite=config.optimizer.on_non_finite,
    )
    sources = {**data.source.summary(), **(data.validation.summary() if data.validation else {})}
    console.summary(start_summary(config, process, shape, files, sources, peak, folder, plan, total_steps))
    console.start(total_steps, state.step + 1)
    return Run(loop, state, console, reporter, total_steps, start_time)


def _check_sizes(config: SFTConfig, model: CausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    if len(tokenizer) > model.vocab_size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer):,} tokens, but the model {config.model.name!r} embeds "
            f"{model.vocab_size:,}; set model.tokenizer to the model's own"
        )
    longest = getattr(model.lm.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and config.data.seq_len > longest:
        logger.warning(
            "data.seq_len = %d is beyond the %d positions that the model was made for",
            config.data.seq_len,
            longest,
        )


def _list_parts(
    weights: ModelPart, optimizer: Part, state: TrainState, source: Source, tracker: TrackerPart
) -> dict[str, Part]:
    return {
        "model": weights,
        "optimizer": optimizer,
        "schedule": StatePart.schedule(state),
        "progress": StatePart.progress(state),
        "data": DataPart(source),
        "tracker": tracker,
    }


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


def _plan_resume(config: SFTConfig, process: Process, folder: RunFolder) -> ResumePlan | None:
    if config.resume is None:
        return None
    plan = plan_resume(config.resume, folder, process, config.model_dump(mode="json"))
    if plan is None and process.is_main:
        logger.warning("the run ended before its first checkpoint: it starts again at step 0")
    return plan


def _open_checkpoint(
    config: SFTConfig,
    process: Process,
    folder: RunFolder,
    parts: Mapping[str, Part],
    model: CausalLM,
    optimizer: Optimizer,
) -> CheckpointManager:
    return CheckpointManager(
        config.ckpt,
        folder,
        process,
        parts,
        config.model_dump(mode="json"),
        state_owners=[optimizer],
        is_state_on_host=config.model.offload != "none",
        model_buffers=model.run_state().keys() - model.run_parameters().keys(),
    )


def _resume(
    checkpoint: CheckpointManager, plan: ResumePlan | None, folder: RunFolder, tracker: TrackerPart
) -> None:
    if plan is None:
        return
    checkpoint.load(plan)
    if plan.path.parent.resolve() != folder.steps.resolve():
        tracker.ids.clear()  # another run's id: going on under it would mix two runs


def seed_everything(seed: int) -> None:
    """Seed every generator of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _warn_of_micro_batch(config: SFTConfig, process: Process) -> None:
    per_rank = config.data.batch_size // process.world_size
    if config.data.micro_batch_size > per_rank and process.is_main:
        logger.warning(
            "data.micro_batch_size = %d is more than the %d rows that each rank has per update; %d are used",
            config.data.micro_batch_size,
            per_rank,
            per_rank,
        )


def _first_on_each_machine(process: Process, function: Callable[[], _T]) -> _T:
    """Call `function` on one rank of each machine, then on the others, which find its files in the cache."""
    if process.local_rank != 0:
        process.barrier()
    result = function()
    if process.local_rank == 0:
        process.barrier()
    return result


def _open_console(config: SFTConfig, process: Process) -> Console:
    if not process.is_main:
        return Console.silent()
    return Console(config.run_name, live=config.log.live, interval=config.log.interval)


def _open_data(config: SFTConfig, process: Process, files: ModelSource) -> _Data:
    tokenizer = load_tokenizer(config.model, files)
    place: dict[str, Any] = {"rank": process.rank, "world_size": process.world_size}
    if not isinstance(config.data, ChatDataConfig):
        source: Source = FakeSource(
            config.data, vocab_size=len(tokenizer), seed=config.seed, max_epochs=config.max_epochs, **place
        )
        return _Data(source, None, tokenizer)
    progress: RichConsole | None = terminal() if process.is_main else None
    shared = {
        **place,
        "pad_rows": config.model.compile,
        "cache_dir": default_cache_dir(),
        "console": progress,
    }
    source = ChatSource(config.data, tokenizer, seed=config.seed, max_epochs=config.max_epochs, **shared)
    validation = None
    if config.validation is not None:
        validation = ValidationRows(config.validation, config.data, tokenizer, **shared)
    return _Data(source, validation, tokenizer)


def _build_model(config: SFTConfig, process: Process, files: ModelSource) -> CausalLM:
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


def _build_engine(config: SFTConfig, process: Process, model: CausalLM) -> tuple[Engine, Optimizer]:
    optimizer = build_optimizer(
        config.optimizer,
        model.run_parameters(),
        block_parameters=model.block_parameters(),
        offload=config.model.offload,
        chunk_bytes=int(config.offload.chunk_mib * 2**20),
        process=process,
    )
    model.masters.clear()  # the optimizer has copied them
    engine = Engine(
        model,
        optimizer,
        CrossEntropy(model.vocab_size),
        process.device,
        is_varlen=config.model.attention == "varlen",
        max_grad_norm=config.optimizer.max_grad_norm,
    )
    return engine, optimizer


def _schedule_steps(config: SFTConfig, state: TrainState, total_steps: int, plan: ResumePlan | None) -> int:
    """Updates that the schedule spans: with a schedule started afresh, those that are left."""
    if plan is None:
        return total_steps
    if "schedule" in plan.skipped and "progress" not in plan.skipped:
        logger.info("the schedule starts afresh over the %d updates that are left", total_steps - state.step)
        return max(1, total_steps - state.step)
    return total_steps


def _open_metrics(
    config: SFTConfig,
    process: Process,
    folder: RunFolder,
    attempt: int,
    tracker: TrackerPart,
    state: TrainState,
) -> Metrics:
    if not process.is_main:
        return Metrics([])
    jsonl = JsonlSink(folder.metrics, attempt=attempt)
    sinks: list[MetricSink] = [jsonl]
    if config.wandb is not None:
        from telemetry.trackers import WandbSink

        sink = WandbSink(
            folder.root,
            project=config.wandb.project,
            run_id=tracker.ids.get("wandb"),
            num_earlier_records=jsonl.num_records,
            entity=config.wandb.entity,
            run_name=config.wandb.name or config.run_name,
            group=config.wandb.group,
            tags=config.wandb.tags,
            offline=config.wandb.offline,
            config=config.model_dump(mode="json"),
        )
        tracker.ids["wandb"] = sink.run_id
        sinks.append(sink)
    if config.tensorboard is not None:
        from telemetry.trackers import TensorboardSink

        flush_seconds = config.tensorboard.flush_seconds
        sinks.append(
            TensorboardSink(folder.tensorboard, flush_seconds=flush_seconds, first_step=state.step + 1)
        )
    return Metrics(sinks)


def run_folder(config: SFTConfig) -> RunFolder:
    """Where the run of `config` lies."""
    return RunFolder.of_run(config.output_dir, config.run_name, config.checkpoint_url)
