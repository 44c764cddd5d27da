"""Kill the parts of small RL runs at random instants, and check that no run minds.

For every part, runs of a few steps that save every step are started as the command `rl` would, and the part
is killed (SIGKILL) at random instants: while it starts, between and within its steps, and at the end of the
run. The run then goes on with `--resume`, up to the next kill, until it is complete. A `worker` is a process
that runs the code of an environment: the run must go on by itself without it.

After each kill: the exit code is that of the part, nothing is left running, the latest step is committed. Of
each complete run: every position of the plan of tasks, computed here from its rule, was trained once,
dropped once, or is still to be done; traces and metrics have every step once; tokens come from the versions
that the policy server must have had after each resume, and its weights were those of the trainer.

    uv run python scripts/kill_rl.py
    uv run python scripts/kill_rl.py --parts trainer worker --instants 5 --steps 12

Prints a line per kill and per run; a fault ends the part, names its folder, which is kept, and the exit code
is 1 then.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT))

from tests.support.rl_kills import MOMENTS, PARTS, KilledRun, Part  # noqa: E402

_WORKERS_PER_RUN = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--instants", type=int, default=20, help="kills of each part")
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="decides the instants")
    parser.add_argument("--max-lead", type=int, help="of the runs; by default 0 and 1 take turns")
    parser.add_argument(
        "--dir", type=Path, help="where the runs lie (default: the folder of temporary files)"
    )
    arguments = parser.parse_args(argv)
    if arguments.dir is not None:
        arguments.dir.mkdir(parents=True, exist_ok=True)
    faults = [part for part in arguments.parts if not kill_part(part, arguments)]
    print(f"faults: {', '.join(faults) or 'none'}", flush=True)
    return 1 if faults else 0


def kill_part(part: Part, arguments: argparse.Namespace) -> bool:
    """Kill one part as often as asked for, in as many runs as that takes; False after a fault."""
    drawn = random.Random(f"{arguments.seed} {part}")
    num_kills = num_runs = 0
    while num_kills < arguments.instants:
        lead = num_runs % 2 if arguments.max_lead is None else arguments.max_lead
        root = Path(tempfile.mkdtemp(dir=arguments.dir, prefix="kill_rl_"))
        begin = time.monotonic()
        try:
            killed, lost = _kill_run(part, root, drawn, lead, arguments, num_kills)
        except Exception:
            traceback.print_exc()
            print(f"{part}: a fault after {num_kills} instants; the run is in {root}", flush=True)
            return False
        num_kills += killed
        num_runs += 1
        shutil.rmtree(root)
        seconds = time.monotonic() - begin
        text = f"run {num_runs} (max_lead {lead}) equals its plan; {lost} episodes lost and counted"
        print(f"{part}: {text}; {seconds:.0f} s", flush=True)
    return True


def _kill_run(
    part: Part, root: Path, drawn: random.Random, lead: int, arguments: argparse.Namespace, num_before: int
) -> tuple[int, int]:
    """One run to its end; returns the number of its kills, and of the episodes that they cost."""
    num_kills = 0
    with KilledRun(root, drawn, arguments.steps, lead) as run:
        while not run.is_complete:
            left = arguments.instants - num_before - num_kills
            if left <= 0:
                run.finish()
                break
            for kill in run.kill(part, drawn.choice(MOMENTS), min(left, _WORKERS_PER_RUN)):
                num_kills += 1
                print(f"{num_before + num_kills:3} {kill}", flush=True)
        return num_kills, run.check()


if __name__ == "__main__":
    sys.exit(main())
