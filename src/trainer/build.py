"""The composition root: from a configuration to a loop that is ready to run. The only file that knows SFT
from RL.

Everything that must be closed goes onto one exit stack, which the caller closes in reverse order, also on an
error.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from contract.errors import ModelError
from contract.layout import RunFolder
from contract.model_files import ModelSource, load_tokenizer, resolve_model
from contract.policy import Origin
from telemetry.console import Console
from trainer.checkpoint.base import Companion, Part
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import ResumePlan, plan_resume
from trainer.config import RLTrainConfig, SFTConfig, TrainConfig
from trainer.engine import Engine
from trainer.feed import Feed, open_dataset, open_stream
from trainer.hooks.base import Hook
from trainer.hooks.build import build_dataset_hooks, build_hooks
from trainer.hooks.run_end import RunEndHook
from trainer.learner import Learner, build_learner
from trainer.loop import Loop
from trainer.model.build import describe
from trainer.model.causal_lm import CausalLM
from trainer.objective.base import Objective
from trainer.objective.cross_entropy import CrossEntropy
from trainer.objective.policy_gradient import PolicyGradient
from trainer.objective.policy_loss import build_token_loss
from trainer.optimizer.schedule import build_schedule
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process
from trainer.parallel.stop import Requests
from trainer.parts import DataPart, SnapshotCompanion, StatePart, TrackerPart
from trainer.publish.base import NoPublisher, Publisher
from trainer.reporter import StepReporter
from trainer.sinks import open_console, open_metrics
from trainer.source.base import Source
from trainer.state import TrainState
from trainer.summary import find_peak, start_summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ORCHESTRATOR = "orchestrator"
"""Component of a checkpoint: what the orchestrator goes on from."""

_T = TypeVar("_T")
_Weights = Callable[[], Mapping[str, LogicalTensor]]


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
class _Kind:
    """What differs between the kinds of training.

    Attributes:
        companions: other processes whose state lies in the checkpoints.
        build_objective: of the size of the vocabulary.
        build_publisher: of the weights that it hands out.
        build_hooks: of the engine; those before and after the export.
    """

    tokenizer: PreTrainedTokenizerBase
    feed: Feed[Source]
    build_objective: Callable[[int], Objective]
    build_hooks: Callable[[Engine], tuple[Sequence[Hook], Sequence[Hook]]]
    build_publisher: Callable[[_Weights], Publisher] = lambda weights: NoPublisher()
    companions: Mapping[str, Companion] = field(default_factory=dict)


def build_run(
    config: TrainConfig,
    process: Process,
    requests: Requests,
    folder: RunFolder,
    attempt: int,
    stack: ExitStack,
) -> Run:
    """Everything of a run, resumed if `config.resume` says so.

    Args:
        stack: takes what must be closed.
    """
    start_time = time.monotonic()
    seed_everything(config.seed + process.rank)
    # Before anything slow: a resume that cannot work is refused at once.
    plan = _plan_resume(config, process, folder)
    files = _first_on_each_machine(process, lambda: resolve_model(config.model))
    console = stack.enter_context(open_console(config, process))
    state, tracker = TrainState(), TrackerPart()
    kind = _first_on_each_machine(
        process, lambda: _open_kind(config, process, requests, folder, files, console, state, stack)
    )
    source = kind.feed.source

    learner = build_learner(config, process, files, kind.build_objective, stack)
    _check_sizes(config, learner.model, kind)
    parts = _list_parts(learner, state, source, tracker)
    checkpoint = stack.enter_context(
        _open_checkpoint(config, process, folder, parts, kind.companions, learner)
    )
    _resume(checkpoint, plan, folder, tracker)
    shape = describe(learner.model)
    total_steps = config.max_steps or state.step + (source.steps_left or 0)
    peak = find_peak(config, process)
    metrics = stack.enter_context(open_metrics(config, process, folder, attempt, tracker, state))
    reporter = StepReporter(
        process, metrics, console, shape, peak, peak_lr=config.optimizer.lr, total_steps=total_steps
    )
    publisher, hooks = _build_outlets(config, process, folder, files, kind, learner, stack)
    loop = Loop(
        process=process,
        engine=learner.engine,
        source=source,
        publisher=publisher,
        checkpoint=checkpoint,
        hooks=hooks,
        reporter=reporter,
        requests=requests,
        state=state,
        schedule=build_schedule(config.schedule, _schedule_steps(config, state, total_steps, plan)),
        total_steps=total_steps,
        on_non_finite=config.optimizer.on_non_finite,
    )
    console.summary(start_summary(config, process, shape, files, kind.feed, peak, folder, plan, total_steps))
    console.start(total_steps, state.step + 1)
    return Run(loop, state, console, reporter, total_steps, start_time)


def _open_kind(
    config: TrainConfig,
    process: Process,
    requests: Requests,
    folder: RunFolder,
    files: ModelSource,
    console: Console,
    state: TrainState,
    stack: ExitStack,
) -> _Kind:
    """Open the source of `config`, and know the rest of its kind."""
    tokenizer = load_tokenizer(config.model, files)
    if isinstance(config, RLTrainConfig):
        origin = Origin(folder.read_run_id(), uuid.uuid4().hex)
        stream = open_stream(config, process, folder, state, origin, stack)
        token_loss = build_token_loss(config.loss)
        # SFT has no use for the libraries that it loads.
        from trainer.publish.build import build_publisher

        return _Kind(
            tokenizer,
            stream,
            build_objective=lambda vocab_size: PolicyGradient(vocab_size, token_loss),
            build_hooks=lambda engine: ((), (RunEndHook(stream.source, process, requests),)),
            build_publisher=lambda weights: build_publisher(
                # What the trainer computes with: the sampler must not have weights of another rounding.
                config,
                process,
                folder,
                weights,
                origin=origin,
                dtype=process.device.compute_dtype(config.model.compute_dtype),
            ),
            companions={_ORCHESTRATOR: SnapshotCompanion(stream.source)},
        )
    assert isinstance(config, SFTConfig)
    dataset = open_dataset(config, process, tokenizer)
    return _Kind(
        tokenizer,
        dataset,
        build_objective=CrossEntropy,
        build_hooks=lambda engine: (
            build_dataset_hooks(config, process, requests, engine, console, tokenizer, dataset.validation),
            (),
        ),
    )


def _build_outlets(
    config: TrainConfig,
    process: Process,
    folder: RunFolder,
    files: ModelSource,
    kind: _Kind,
    learner: Learner,
    stack: ExitStack,
) -> tuple[Publisher, Sequence[Hook]]:
    """What is called beside the update, closed by `stack`."""
    weights = learner.weights.tensors
    publisher = kind.build_publisher(weights)
    stack.callback(publisher.close)
    before, after = kind.build_hooks(learner.engine)
    hooks = build_hooks(
        config, process, folder, files, weights, kind.tokenizer, before_export=before, after_export=after
    )
    for hook in hooks:
        stack.callback(hook.close)
    return publisher, hooks


def _check_sizes(config: TrainConfig, model: CausalLM, kind: _Kind) -> None:
    num_tokens = len(kind.tokenizer)
    if num_tokens > model.vocab_size:
        raise ModelError(
            f"the tokenizer has {num_tokens:,} tokens, but the model {config.model.name!r} embeds "
            f"{model.vocab_size:,}; set model.tokenizer to the model's own"
        )
    longest = getattr(model.lm.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and kind.feed.seq_len > longest:
        logger.warning(
            "%s = %d is beyond the %d positions that the model was made for",
            kind.feed.seq_len_key,
            kind.feed.seq_len,
            longest,
        )


def _list_parts(learner: Learner, state: TrainState, source: Source, tracker: TrackerPart) -> dict[str, Part]:
    return {
        "model": learner.weights,
        "optimizer": learner.optimizer,
        "schedule": StatePart.schedule(state),
        "progress": StatePart.progress(state),
        "data": DataPart(source),
        "tracker": tracker,
    }


def _plan_resume(config: TrainConfig, process: Process, folder: RunFolder) -> ResumePlan | None:
    if config.resume is None:
        return None
    companions = (_ORCHESTRATOR,) if isinstance(config, RLTrainConfig) else ()
    plan = plan_resume(config.resume, folder, process, config.model_dump(mode="json"), companions=companions)
    if plan is None and process.is_main:
        logger.warning("the run ended before its first checkpoint: it starts again at step 0")
    return plan


def _open_checkpoint(
    config: TrainConfig,
    process: Process,
    folder: RunFolder,
    parts: Mapping[str, Part],
    companions: Mapping[str, Companion],
    learner: Learner,
) -> CheckpointManager:
    return CheckpointManager(
        config.ckpt,
        folder,
        process,
        parts,
        config.model_dump(mode="json"),
        companions=companions,
        state_owners=[learner.optimizer],
        is_state_on_host=config.model.offload != "none",
        model_buffers=learner.model.run_state().keys() - learner.model.run_parameters().keys(),
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


def _first_on_each_machine(process: Process, function: Callable[[], _T]) -> _T:
    """Call `function` on one rank of each machine, then on the others, which find its files in the cache."""
    if process.local_rank != 0:
        process.barrier()
    result = function()
    if process.local_rank == 0:
        process.barrier()
    return result


def _schedule_steps(config: TrainConfig, state: TrainState, total_steps: int, plan: ResumePlan | None) -> int:
    """Updates that the schedule spans: with a schedule started afresh, those that are left."""
    if plan is None:
        return total_steps
    if "schedule" in plan.skipped and "progress" not in plan.skipped:
        logger.info("the schedule starts afresh over the %d updates that are left", total_steps - state.step)
        return max(1, total_steps - state.step)
    return total_steps


def run_folder(config: TrainConfig) -> RunFolder:
    """Where the run of `config` lies."""
    return RunFolder.of_run(config.output_dir, config.run_name, config.checkpoint_url)
