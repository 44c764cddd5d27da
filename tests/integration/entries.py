"""Programs for tests of launches of two trainers that go in a way of their own.

python -m tests.integration.entries launch BEHAVIOUR CONFIG ATTEMPT
python -m tests.integration.entries BEHAVIOUR CONFIG ATTEMPT

BEHAVIOUR is `failing` (the data of rank 1 fails) or `slow` (a write of a checkpoint takes seconds).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

WRITE_SECONDS = 3.0


def launch(behaviour: str, config: Path, attempt: Path) -> int:
    """Launch two such trainers."""
    from launcher.processes import launch as launch_ranks
    from launcher.spec import LaunchSpec

    command = [sys.executable, "-m", "tests.integration.entries", behaviour, str(config), str(attempt)]
    return launch_ranks(LaunchSpec(command, 2, attempt, 1, grace_seconds=60, stop_seconds=5))


def failing(config: Path, attempt: Path) -> int:
    """The trainer; on rank 1 the source of rows raises when it is asked for the second update."""
    from trainer.cli import run
    from trainer.source.rows import RowSource

    whole = RowSource.next_step
    calls = 0

    def next_step(source: RowSource) -> object:
        nonlocal calls
        calls += 1
        if calls == 2 and os.environ["RANK"] == "1":
            raise ZeroDivisionError("rank 1 cannot read its rows")
        return whole(source)

    RowSource.next_step = next_step  # pyright: ignore[reportAttributeAccessIssue]
    return run(config, attempt)


def slow(config: Path, attempt: Path) -> int:
    """The trainer; a write goes on for seconds after its folder has appeared, before it is committed."""
    from trainer.checkpoint.storage import LocalStorage
    from trainer.cli import run

    whole = LocalStorage.commit

    def commit(storage: LocalStorage, *arguments: Any, **options: Any) -> object:
        time.sleep(WRITE_SECONDS)
        return whole(storage, *arguments, **options)

    LocalStorage.commit = commit  # pyright: ignore[reportAttributeAccessIssue]
    return run(config, attempt)


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "launch":
        sys.exit(launch(words[0], Path(words[1]), Path(words[2])))
    sys.exit({"failing": failing, "slow": slow}[role](Path(words[0]), Path(words[1])))
