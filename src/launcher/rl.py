"""The entry point of the command `rl`; `rl_run` is what it does."""

from __future__ import annotations

import sys
from collections.abc import Callable

from contract.entry import entry_point


@entry_point(before="training began")
def main() -> Callable[..., int]:
    """Entry point; returns the exit code. Takes the words of the command line, if not those of `argv`."""
    from launcher.rl_run import run

    return run


if __name__ == "__main__":
    sys.exit(main())
