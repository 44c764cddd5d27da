"""The agent: torchrun's own machinery for one machine, run as a process of its own.

It sets up the rendezvous on the loopback interface at a free port, starts one guard per rank with the
environment that torchrun gives (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, ...), and ends all of them when one
fails. There are no restarts: a run goes on from its checkpoint by `resume`. Runs as `python -m launcher.agent
launch.json`; torch is imported here and not in the launcher, which stays small and quick to answer signals.
"""

from __future__ import annotations

import math
import os
import sys
import uuid
from pathlib import Path

from contract.errors import EXIT_FAILURE, EXIT_OK, EXIT_SIGNAL_BASE
from launcher.spec import AGENT_VARIABLE, LaunchSpec, read_spec


def run(spec: LaunchSpec) -> int:
    """Run all ranks to their end; the exit code only says whether all succeeded. See the exit records."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=spec.num_processes,
        run_id=uuid.uuid4().hex,
        role="trainer",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        # The guards write the logs.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        # Guards kill their rank after grace_seconds at the latest; the agent must not be quicker.
        shutdown_timeout=math.ceil(spec.grace_seconds) + 5,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "launcher.guard", str(spec.path))
    except ChildFailedError:
        return EXIT_FAILURE
    except SignalException as error:
        return EXIT_SIGNAL_BASE + error.sigval
    return EXIT_OK


def main() -> int:
    """Entry point."""
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    return run(read_spec(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
