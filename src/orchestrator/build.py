"""The composition root of the orchestrator: from its configuration to a pipeline of real parts."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from contract.channel.build import open_sender
from contract.layout import RunFolder
from contract.model_files import ModelSource, load_tokenizer
from contract.store import parse_folder
from orchestrator.background import Background, LoopLag
from orchestrator.client import PolicyClient
from orchestrator.config import OrchestratorConfig, RolloutConfig, SourceConfig
from orchestrator.credit.build import build_credit
from orchestrator.dispatch import Dispatcher, places_for
from orchestrator.environment.pool import LoadedSource, load_sources
from orchestrator.episode import EpisodeRunner
from orchestrator.evaluate import Evaluator
from orchestrator.group import Runner, TaskSource
from orchestrator.pipeline import Parts, Pipeline, Span
from orchestrator.plan import Plan, PlannedSource
from orchestrator.progress import Progress, Snapshot, load_snapshot
from orchestrator.tokens import TurnRenderer

logger = logging.getLogger(__name__)

_COMPONENT = "orchestrator"
_CALLS_PER_EPISODE = 3
"""Of an environment, besides one for each turn: its task, its start and its reward."""


def run_folder(config: OrchestratorConfig) -> RunFolder:
    """The folder of the run."""
    return RunFolder(Path(config.output_dir).expanduser() / config.run_name)


async def build_pipeline(
    config: OrchestratorConfig, files: ModelSource, lag: LoopLag, stack: AsyncExitStack
) -> Pipeline:
    """Load the environments and the tokenizer, and open the ways to policy server and trainer.

    Args:
        files: of the model that `config` names.
        stack: takes what must be closed.

    Raises:
        TailraceError: a part cannot be made, or the checkpoint is not one of this run.
    """
    folder = run_folder(config)
    run_id = folder.read_run_id()
    sources = await _load(config.sources, stack)
    progress, snapshot = build_progress(config, sources)
    version = 0 if snapshot is None else snapshot.step
    rollout = config.rollout
    client = _open_client(config, run_id)
    stack.push_async_callback(client.close)
    renderer = await asyncio.to_thread(_load_renderer, config, files)
    runner = EpisodeRunner(client, renderer, config.seq_len)
    limiter, background = asyncio.Semaphore(places_for(rollout)), Background()
    evaluator, held_out = await _build_evaluator(config, runner, limiter, folder, stack)
    sender = open_sender(config.channel, folder)
    stack.push_async_callback(sender.close)
    span = Span(
        run_id,
        version,
        config.max_steps,
        config.seq_len,
        rollout.lead == 0,
        folder.rollouts,
        longest_episode(rollout, [*sources, *held_out]),
        rollout.version_timeout_seconds,
    )
    dispatcher = Dispatcher(
        sources,
        runner,
        progress,
        build_credit(config.algorithm),
        rollout=rollout,
        sampling=config.sampling,
        seed=config.seed,
        limiter=limiter,
        background=background,
    )
    _warn_of_hidden_tools(renderer, [*sources, *held_out])
    logger.info("tasks: %s", ", ".join(f"{source.num_tasks:,} of {source.title}" for source in sources))
    if snapshot is not None:
        logger.info(
            "going on after batch %d: %d tasks were under way and come first",
            snapshot.step,
            len(snapshot.outstanding),
        )
    counts = partial(_counts, client, [*sources, *held_out])
    parts = Parts(client, sender, progress, dispatcher, evaluator, background, lag, counts)
    return Pipeline(span, parts, snapshot)


def build_progress(
    config: OrchestratorConfig, sources: Sequence[TaskSource]
) -> tuple[Progress, Snapshot | None]:
    """Where the run stands among its tasks, and the snapshot that says so (None before the first batch).

    Raises:
        CheckpointError: the checkpoint holds no such snapshot.
        DataError: it is of other tasks.
    """
    planned = [
        PlannedSource(
            source.title, settings.weight, source.num_tasks, settings.environment, settings.settings
        )
        for source, settings in zip(sources, config.sources, strict=True)
    ]
    group_size = config.rollout.group_size
    plan = Plan(planned, config.seed)
    if config.resume_dir is None:
        return Progress(plan, group_size), None
    checkpoint = parse_folder(config.resume_dir)
    snapshot = load_snapshot(checkpoint / _COMPONENT, plan.identity(group_size))
    if snapshot is None:
        return Progress(plan, group_size), None
    return Progress(Plan(planned, config.seed, snapshot.counts), group_size, snapshot.outstanding), snapshot


def _warn_of_hidden_tools(renderer: TurnRenderer, sources: Sequence[LoadedSource]) -> None:
    for title in sorted(
        {source.title for source in sources if source.tools and not renderer.shows(source.tools)}
    ):
        logger.warning(
            "%s offers tools, but the chat template does not write them: the policy is told of them only by "
            "what the environment says; set model.chat_template to one that writes `tools`, or take a model "
            "that was made for them",
            title,
        )


def _open_client(config: OrchestratorConfig, run_id: str) -> PolicyClient:
    return PolicyClient(
        config.servers,
        api_key=config.server_key,
        request_timeout_seconds=config.rollout.request_timeout_seconds,
        server_patience_seconds=config.rollout.server_patience_seconds,
        run_id=run_id,
    )


def _counts(client: PolicyClient, sources: Sequence[LoadedSource]) -> dict[str, int]:
    return {
        "environment/workers_replaced": sum(source.counters.workers_replaced for source in sources),
        "requests/retried": client.num_retries,
    }


def longest_episode(rollout: RolloutConfig, sources: Sequence[LoadedSource]) -> float:
    """Seconds after which, by all limits together, one of the episodes under way must have ended."""
    places = places_for(rollout)
    longest = 0.0
    for source in sources:
        # Calls wait for their turn while the workers are at those of other episodes.
        rounds = math.ceil(places / source.config.num_workers)
        call = rounds * source.config.timeout_seconds
        calls = (source.max_turns + _CALLS_PER_EPISODE) * call
        longest = max(
            longest,
            # The task is asked for before the episode begins.
            min(
                calls + source.max_turns * rollout.request_timeout_seconds,
                call + rollout.episode_timeout_seconds,
            ),
        )
    return longest + rollout.server_patience_seconds


async def _load(configs: Sequence[SourceConfig], stack: AsyncExitStack) -> list[LoadedSource]:
    sources = await load_sources(configs)
    for source in sources:
        stack.push_async_callback(source.close)
    return sources


def _load_renderer(config: OrchestratorConfig, files: ModelSource) -> TurnRenderer:
    return TurnRenderer(load_tokenizer(config.model, files))


async def _build_evaluator(
    config: OrchestratorConfig,
    runner: Runner,
    limiter: asyncio.Semaphore,
    folder: RunFolder,
    stack: AsyncExitStack,
) -> tuple[Evaluator | None, list[LoadedSource]]:
    if config.evaluation is None:
        return None, []
    sources = await _load(config.evaluation.sources, stack)
    evaluator = Evaluator(
        config.evaluation,
        sources,
        runner,
        sampling=config.sampling,
        seed=config.seed,
        limiter=limiter,
        rollouts=folder.rollouts,
        episode_timeout_seconds=config.rollout.episode_timeout_seconds,
    )
    return evaluator, sources
