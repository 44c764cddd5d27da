"""Sources with their worker processes: calls of environments with time limits, and workers that are replaced.

Owns the worker processes of each source and the queue before them. An environment is stateless between calls,
so any worker serves any call, and a worker that is killed loses the one call that it was at.

Invariants: a call fails when its worker dies, when the environment raises, or when it has run for longer than
the source's `timeout_seconds`, which is counted from when the worker comes to it; calls behind it go to
another worker. Calls wait in one queue while workers are busy or being replaced; that wait has a limit too.
The event loop never runs code of an environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from orchestrator.config import SourceConfig
from orchestrator.environment.base import Message
from orchestrator.environment.workers import Counters, Limits, WorkerPool

__all__ = ["Counters", "Limits", "LoadedSource", "load_sources"]


class LoadedSource:
    """A source whose workers run. All its methods may be called many times at once.

    Attributes:
        config: its settings.
        title: its name in metrics.
        num_tasks: tasks are numbered from 0.
        max_turns: most turns of the policy in one episode.
        tools: JSON schemas for the chat template.
    """

    def __init__(self, config: SourceConfig, pool: WorkerPool, description: dict[str, Any]) -> None:
        self.config = config
        self.title = config.title
        self.num_tasks: int = description["num_tasks"]
        self.max_turns: int = description["max_turns"]
        self.tools: list[dict[str, Any]] = description["tools"]
        self._pool = pool

    @property
    def counters(self) -> Counters:
        """What has happened so far; goes on counting."""
        return self._pool.counters

    @property
    def worker_pids(self) -> list[int]:
        """The processes that serve calls now."""
        return self._pool.worker_pids

    async def task(self, index: int) -> dict[str, Any]:
        """The task `index`.

        Raises:
            EpisodeFailed: `environment`, `timeout` or `worker`; so for every method.
            EnvironmentFailure: the workers cannot be started any more; so for every method.
        """
        return await self._pool.call("task", index)

    async def start(self, task: dict[str, Any]) -> list[Message]:
        """The messages that an episode begins with: at least one, the last not the assistant's."""
        return await self._pool.call("start", task)

    async def respond(
        self, task: dict[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> tuple[list[Message] | None, dict[str, Any]]:
        """The messages that follow the policy's turn, or None at the end; and the new state."""
        answer, state = await self._pool.call("respond", task, messages, state)
        return answer, state

    async def reward(
        self, task: dict[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> dict[str, float]:
        """Finite rewards by name, `reward` among them."""
        return await self._pool.call("reward", task, messages, state)

    async def close(self) -> None:
        """End the workers. Calls that wait are cancelled. A second call does nothing."""
        await self._pool.close()


async def load_sources(configs: Sequence[SourceConfig], limits: Limits | None = None) -> list[LoadedSource]:
    """Start the workers of all sources at once, and ask them for their tasks; in the order of `configs`.

    Args:
        limits: waits that are no setting of a source; None takes the defaults.

    Raises:
        ConfigError: an environment does not exist, or does not take its settings.
        EnvironmentFailure: its module or its constructor fails or takes too long.
    """
    pools = [WorkerPool(config, limits or Limits()) for config in configs]
    try:
        found = await asyncio.gather(*(pool.start() for pool in pools))
    except BaseException:
        await asyncio.gather(*(pool.close() for pool in pools))
        raise
    return [LoadedSource(*parts) for parts in zip(configs, pools, found, strict=True)]
