"""How tests are dealt to several processes (`pytest -n 2`)."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The tests of a file stay together, for they share what is made once, and long ones come first."""
    count: int | str | None = config.option.numprocesses  # or "auto"
    if not count or config.option.dist != "no":
        return
    config.option.dist = "loadfile"
    # Whole runs stand before unit tests, and a file of them takes minutes.
    config.option.loadscopereorder = False
    if isinstance(count, int):
        # Every process would take all cores, and threads that wait for each other spin.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
