from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import ConfigError, EnvironmentFailure, TailraceError
from orchestrator.config import SourceConfig
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.environment.pool import Limits, load_sources

from .sources import config_of, gone, order, running


def _error(config: SourceConfig, limits: Limits | None = None) -> TailraceError:
    """What loading raises, once no worker is left; without `limits`, a good source is loaded beside it."""
    configs = [config_of("Echo"), config] if limits is None else [config]

    async def run() -> TailraceError:
        with pytest.raises(TailraceError) as caught:
            await load_sources(configs, limits)
        assert _children() == []
        return caught.value

    return asyncio.run(run())


def _children() -> list[int]:
    """Processes of this one that run the module of workers."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [int(pid) for pid, line in lines.items() if b"orchestrator.environment.worker" in line]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("reverse-txt", ["neither built in (reverse-text, sort-letters", "package.module:Class"]),
        ("no_such_package.module:Name", ["no module 'no_such_package'", "current folder"]),
        ("tests.support.no_such_module:Name", ["no module 'tests.support.no_such_module'"]),
        ("tests.support.environments:Ecko", ["has no 'Ecko'", "Echo, AsyncEcho"]),
        ("tests.support.environments:NOT_CALLABLE", ["is a int", "a class, or a function"]),
        ("builtins:dict", ["no class or function of Python"]),
        ("os:getcwd", ["made a str", "subclass of orchestrator.environment.Environment"]),
    ],
)
def test_an_environment_that_does_not_exist_is_a_config_error(environment: str, words: list[str]) -> None:
    error = _error(SourceConfig(environment=environment, name="mine"))
    assert isinstance(error, ConfigError)
    for word in ["source 'mine'", *words]:
        assert word in str(error)


def test_an_unknown_setting_is_refused_with_those_that_are_accepted() -> None:
    error = _error(SourceConfig(environment="arithmetic", settings={"digit": 3}))
    assert isinstance(error, ConfigError)
    for word in ["source 'arithmetic'", "'digit'", "digits = 2", "operators = '+-'", "sources.settings"]:
        assert word in str(error)


def test_a_setting_that_the_constructor_refuses_is_a_config_error() -> None:
    error = _error(config_of("BadStart", settings={"how": "refuse"}))
    assert isinstance(error, ConfigError)
    assert "source 'BadStart'" in str(error) and "how must be something else" in str(error)


@pytest.mark.parametrize(
    ("how", "words"), [("raise", "OSError: no data"), ("exit", "exit code 5"), ("hang", "longer than 1 s")]
)
def test_a_constructor_that_fails_or_hangs_ends_the_start(how: str, words: str) -> None:
    limits = Limits(start_seconds=1.0) if how == "hang" else None
    error = _error(config_of("BadStart", settings={"how": how}), limits)
    assert isinstance(error, EnvironmentFailure)
    assert "BadStart" in str(error) and words in str(error)


def test_workers_with_other_tasks_are_refused() -> None:
    error = _error(config_of("BadStart", settings={"how": "differ"}, num_workers=2))
    assert isinstance(error, EnvironmentFailure) and "two workers differ" in str(error)


def test_a_constructor_that_fails_at_every_replacement_ends_the_source(tmp_path: Path) -> None:
    async def run() -> None:
        config = config_of("StartsOnce", settings={"path": str(tmp_path / "started")})
        async with running(config, Limits(start_attempts=2)) as source:
            calls = [asyncio.create_task(order(source, "1")) for _ in range(3)]
            with pytest.raises(EpisodeFailed, match="exit code 8"):
                await calls[0]
            for call in calls[1:]:
                with pytest.raises(EnvironmentFailure, match="exit code 7"):
                    await call
            with pytest.raises(EnvironmentFailure, match="exit code 7"):
                await source.task(0)

    asyncio.run(run())


def test_the_wait_for_a_free_worker_has_a_limit() -> None:
    async def run() -> None:
        async with running("Naughty", Limits(queue_seconds=0.2), timeout_seconds=3600) as source:
            hanging = asyncio.create_task(order(source, "hang"))
            await asyncio.sleep(0)
            with pytest.raises(EpisodeFailed, match=r"waited 0.2 s for a free worker.*num_workers") as caught:
                await order(source, "1")
            assert caught.value.kind == "timeout" and not hanging.done()

    asyncio.run(run())


def test_a_function_may_make_the_environment() -> None:
    async def run() -> None:
        async with running("make_echo", settings={"num_tasks": 7}) as source:
            assert (source.title, source.num_tasks) == ("make_echo", 7)

    asyncio.run(run())


def test_modules_in_the_current_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_tasks.py").write_text(
        "from orchestrator.environment import Environment\n"
        "class Mine(Environment):\n"
        "    def __len__(self): return 42\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # Python itself then leaves the current folder out.

    async def run() -> None:
        async with running(SourceConfig(environment="my_own_tasks:Mine")) as source:
            assert source.num_tasks == 42

    asyncio.run(run())


_PARENT = """
import asyncio, sys
from tests.unit.orchestrator.environment.sources import order, running

async def main():
    async with running("Naughty", timeout_seconds=3600) as source:
        hanging = asyncio.create_task(order(source, "hang"))
        await asyncio.sleep(0.2)
        print(source.worker_pids[0], flush=True)
        await hanging

asyncio.run(main())
"""


def test_a_hanging_worker_dies_with_a_killed_orchestrator() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert os.getpgid(worker) == os.getpgid(parent.pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait(30)
        asyncio.run(gone(worker))
