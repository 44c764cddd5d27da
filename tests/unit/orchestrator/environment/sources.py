"""Sources of tests: a pool of an environment in tests/support/environments.py, and the end of processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from orchestrator.config import SourceConfig
from orchestrator.environment.pool import Limits, LoadedSource, load_sources

WAIT_SECONDS = 30.0


def config_of(environment: str, **kwargs: Any) -> SourceConfig:
    """A source of one of the environments of tests.support."""
    return SourceConfig(environment=f"tests.support.environments:{environment}", **kwargs)


@asynccontextmanager
async def running(
    config: SourceConfig | str, limits: Limits | None = None, **kwargs: Any
) -> AsyncIterator[LoadedSource]:
    """The source, with its workers until the end of the block."""
    config = config_of(config, **kwargs) if isinstance(config, str) else config
    [source] = await load_sources([config], limits)
    try:
        yield source
    finally:
        await source.close()


async def order(source: LoadedSource, text: str, **state: Any) -> float:
    """Have `Naughty` do something; returns the reward."""
    rewards = await source.reward({"answer": "1"}, [{"role": "assistant", "content": text}], state)
    return rewards["reward"]


async def gone(pid: int) -> None:
    """Wait until the process has ended."""
    deadline = time.monotonic() + WAIT_SECONDS
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return os.path.exists(f"/proc/{pid}")
