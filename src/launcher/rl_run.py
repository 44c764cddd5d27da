"""What the command `rl` does: read the configuration, prepare the run folder, start the parts of the run,
watch them.

Everything that can be refused is refused before a process starts or a file of an earlier run is touched. What
all parts must agree on is decided here, once: the step to go on from, addresses, the id of the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import EXIT_OK, ConfigError
from contract.layout import RunFolder
from contract.sections import ZmqChannelConfig
from contract.settings.base import Settings
from contract.settings.dump import to_toml
from contract.settings.load import Loaded, with_values
from launcher import folder as run_folder
from launcher.devices import visible_gpus
from launcher.output import console_width
from launcher.placement import Placement, place
from launcher.ports import check_port, free_port, url_of
from launcher.prepare import (
    check_model_and_store,
    check_seq_len,
    dry_run_prefix,
    note,
    prepare,
    resolved,
    run_command,
)
from launcher.rl_config import RLConfig
from launcher.rl_start import Start, decide_start, remove_leftovers, run_id_of
from launcher.running import ORCHESTRATOR, SERVER, TRAINER, PartSpec
from launcher.spec import num_cores
from launcher.supervisor import RunSpec, Supervisor
from launcher.view import View

_DESCRIPTION = "Reinforcement learning of a causal language model, on one CPU or many GPUs."


@dataclass(frozen=True, slots=True)
class Plan:
    """What every part gets: `config` with all ports and numbers filled in, and where it runs."""

    config: RLConfig
    placement: Placement
    port: int | None
    servers: list[str]

    def parts(self, run_id: str, resume_dir: str | None) -> dict[str, Settings]:
        """The configuration of each part by its name; none of a server that runs already."""
        found: dict[str, Settings] = {
            TRAINER: self.config.trainer(self.servers),
            ORCHESTRATOR: self.config.orchestrator(self.servers, resume_dir),
        }
        if self.port is not None:
            found[SERVER] = self.config.policy_server(self.port, run_id)
        return found


def run(argv: Sequence[str] | None = None) -> int:
    """All of the command; returns the exit code. `argv` None takes the words of the command line."""
    return run_command(RLConfig, argv, prog="rl", description=_DESCRIPTION, run=_run)


def _run(loaded: Loaded[RLConfig]) -> int:
    config = loaded.settings
    folder = RunFolder.of_run(config.output_dir, config.run_name, config.checkpoint_url)
    for notice in loaded.notices:
        note(notice)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError("rl starts its processes itself: run it once, without torchrun")
    if loaded.dry_run:
        return _dry_run(config, folder)
    run_folder.check_usable(folder, resume=config.resume is not None, clean=config.clean)
    with run_folder.lock(folder) as held:
        return _start(config, folder, held)


def make_plan(config: RLConfig) -> Plan:
    """Decide where the parts run and how they reach each other.

    Raises:
        ConfigError: a device or a port that is set cannot be had.
    """
    placement = place(config, visible_gpus(), num_cores())
    values: dict[str, object] = {"deployment.num_processes": placement.num_ranks}
    if isinstance(config.channel, ZmqChannelConfig):
        bound, port = config.channel.bound, config.channel.port
        if port is not None:
            check_port(bound, port, "channel.port")
        values["channel.port"] = port or free_port(bound)
    if config.servers:
        return Plan(_filled(config, values), placement, None, config.servers)
    host, port = config.inference.host, config.inference.port
    if port is not None:
        check_port(host, port, "inference.port")
    port = port or free_port(host)
    values["inference.num_threads"] = placement.server_threads
    values["deployment.num_threads"] = placement.trainer_threads
    return Plan(_filled(config, values), placement, port, [url_of(host, port)])


def _filled(config: RLConfig, values: dict[str, object]) -> RLConfig:
    # The mesh must fit a number of processes that was not set, too.
    return with_values(config, values, origin="chosen by rl", prog="rl")


def _check_inputs(config: RLConfig, folder: RunFolder) -> Start:
    """Refuse what cannot work; returns where the run begins."""
    model = check_model_and_store(config)
    check_seq_len(model, config.model.name, config.seq_len)
    return decide_start(config, folder)


def _start(config: RLConfig, folder: RunFolder, held: int) -> int:
    """Prepare the folder and run all parts to their end."""
    plan = make_plan(config)
    start = Start()

    def check() -> None:
        nonlocal start
        start = _check_inputs(config, folder)

    # The API key guards the policy server from other users of this machine, too.
    private = config.key is not None
    attempt = prepare(config, folder, command="rl", check_inputs=check, private=private).absolute()
    for text in (*plan.placement.notes, *start.warnings):
        note(text)
    remove_leftovers(folder)
    run_id = run_id_of(folder)
    resume_dir = start.resume_dir(config)
    for name, part in plan.parts(run_id, None).items():
        run_folder.write_config(folder, _part_text(part, name), f"{name}.toml", private=private)
    fixed = Plan(_for_attempt(start.fixed(plan.config), plan), plan.placement, plan.port, plan.servers)
    for name, part in fixed.parts(run_id, resume_dir).items():
        if name == SERVER:
            part = part.model_copy(update={"log_file": attempt / "inference_debug.log"})
        text = to_toml(part, header="What this attempt was started with.")
        run_folder.write_text(attempt / f"{name}.toml", text, private=private)
    view = View(attempt, folder.metrics, live=config.log.live)
    return Supervisor(_spec(plan, folder, attempt, run_id), view, keep_open=(held,)).run()


def _for_attempt(config: RLConfig, plan: Plan) -> RLConfig:
    """What differs from the resolved configuration because the parts run under this process."""
    update: dict[str, object] = {
        "clean": False,
        # This process draws the panel.
        "log": config.log.model_copy(update={"live": False}),
    }
    if plan.placement.server_gpu is not None:
        # Its process sees one GPU only.
        update["inference"] = config.inference.model_copy(update={"device": "cuda"})
    return config.model_copy(update=update)


def _part_text(part: Settings, name: str) -> str:
    part = part.model_copy(
        update={key: value for key, value in (("clean", False), ("resume", None)) if hasattr(part, key)}
    )
    return to_toml(part, header=f"The share of this process; run it alone with `{name} @ THIS_FILE`.")


def _spec(plan: Plan, folder: RunFolder, attempt: Path, run_id: str) -> RunSpec:
    config, placement = plan.config, plan.placement
    everywhere = {
        "PYTHONUNBUFFERED": "1",
        # The watchdog ends a process that hangs by a signal at which it says where.
        "PYTHONFAULTHANDLER": "1",
        # Output goes through a file to this console: programs should still fill its width.
        "COLUMNS": str(console_width()),
    }

    def part(name: str, environment: dict[str, str], module: list[str], num_ranks: int = 0) -> PartSpec:
        command = [sys.executable, "-m", *module, str(attempt / f"{name}.toml"), str(attempt)]
        return PartSpec(name, command, {**everywhere, **environment}, num_ranks)

    several = ["launcher.parts", "ranks"]
    server = part(SERVER, placement.server_environment(), ["inference"])
    return RunSpec(
        attempt_dir=attempt,
        server=server if plan.port is not None else None,
        orchestrator=part(
            ORCHESTRATOR, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, ["orchestrator"]
        ),
        trainer=part(
            TRAINER,
            placement.trainer_environment(),
            ["trainer"] if placement.num_ranks == 1 else several,
            placement.num_ranks,
        ),
        server_urls=plan.servers,
        run_id=run_id,
        start_seconds=config.server_start_seconds,
        grace_seconds=config.grace_seconds,
        metrics=folder.metrics,
        watchdog_seconds=None if config.watchdog_minutes is None else 60 * config.watchdog_minutes,
    )


def _dry_run(config: RLConfig, folder: RunFolder) -> int:
    """Write the resolved configurations and say what would be started where."""
    start = Start()

    def check() -> None:
        nonlocal start
        start = _check_inputs(config, folder)

    prefix = dry_run_prefix(config, folder, check)
    plan = make_plan(config)
    name = f"{prefix}_" if prefix else ""
    private = config.key is not None
    path = run_folder.write_config(folder, resolved(config, "rl"), f"{name}rl.toml", private=private)
    for part, settings in plan.parts("", None).items():
        run_folder.write_config(folder, _part_text(settings, part), f"{name}{part}.toml", private=private)
    print(f"the configuration is valid; resolved: {path}, and one file of each part beside it")
    for line in _describe(plan, start):
        print(f"  {line}")
    for text in plan.placement.notes:
        note(text)
    return EXIT_OK


def _describe(plan: Plan, start: Start) -> list[str]:
    config, placement = plan.config, plan.placement

    def cpu(threads: int) -> str:
        return f"CPU, {threads} thread{'s' if threads != 1 else ''}"

    def gpus(names: list[str]) -> str:
        return f"GPU {', '.join(names)}" if names else cpu(placement.trainer_threads)

    server = gpus([placement.server_gpu]) if placement.server_gpu else cpu(placement.server_threads)
    lines = [f"start: {f'step {start.step} of {start.checkpoint}' if start.checkpoint else 'step 0'}"]
    if plan.port is None:
        lines.append(f"policy servers that run already: {', '.join(plan.servers)}")
    else:
        lines.append(f"policy server: {config.inference.engine.type} at {plan.servers[0]}, on {server}")
    channel = config.channel
    way = f"zmq at {channel.host}:{channel.port}" if isinstance(channel, ZmqChannelConfig) else channel.type
    sources = ", ".join(source.title for source in config.sources)
    lines.append(f"orchestrator: {sources}; batches by {way}")
    ranks = f"{placement.num_ranks} process{'es' if placement.num_ranks != 1 else ''}"
    lines.append(f"trainer: {ranks} on {gpus(placement.trainer_gpus)}; weights by {config.publish.type}")
    return lines
