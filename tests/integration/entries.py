"""Programs for the test of a rank that fails: the launcher, and a trainer whose data fails on rank 1.

python -m tests.integration.entries launch CONFIG ATTEMPT
python -m tests.integration.entries rank CONFIG ATTEMPT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def launch(config: Path, attempt: Path) -> int:
    """Launch two failing trainers."""
    from launcher.processes import launch as launch_ranks
    from launcher.spec import LaunchSpec

    command = [sys.executable, "-m", "tests.integration.entries", "rank", str(config), str(attempt)]
    return launch_ranks(LaunchSpec(command, 2, attempt, 1, grace_seconds=60, stop_seconds=5))


def rank(config: Path, attempt: Path) -> int:
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


if __name__ == "__main__":
    sys.exit({"launch": launch, "rank": rank}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3])))
