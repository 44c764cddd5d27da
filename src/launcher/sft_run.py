"""What the command `sft` does: read the configuration, prepare the run folder, start the trainer.

Everything that can be refused is refused before a process starts or a file of an earlier run is touched. One
process runs here, several under torchrun's agent (see `processes`); under an outer torchrun this process is
one of its ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from contract.entry import undisturbed_import
from contract.errors import EXIT_OK, ConfigError, RunFolderError
from contract.layout import RunFolder
from contract.settings.load import Loaded, with_values
from launcher import folder as run_folder
from launcher.devices import count_gpus, default_processes
from launcher.prepare import check_model_and_store, dry_run_prefix, note, prepare, resolved, run_command
from launcher.processes import launch
from launcher.spec import LaunchSpec, num_cores
from trainer.config import SFTConfig
from trainer.config.data import ChatSourceConfig

_DESCRIPTION = "Supervised fine-tuning of a causal language model, on one CPU or many GPUs."
_PEER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class OuterRank:
    """This process as a rank of a torchrun that the user started."""

    rank: int
    world_size: int
    local_world_size: int
    launch_id: str

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> OuterRank | None:
        """The rank that torchrun's variables describe; None if there are none."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        world_size = int(environment["WORLD_SIZE"])
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        return OuterRank(
            rank=int(environment["RANK"]),
            world_size=world_size,
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
            launch_id=":".join(environment.get(name, "") for name in names),
        )


def run(argv: Sequence[str] | None = None) -> int:
    """All of the command; returns the exit code. `argv` None takes the words of the command line."""
    return run_command(
        SFTConfig,
        argv,
        prog="sft",
        description=_DESCRIPTION,
        run=lambda loaded: _run(loaded, OuterRank.from_environment(os.environ)),
    )


def _run(loaded: Loaded[SFTConfig], outer: OuterRank | None) -> int:
    config = loaded.settings
    folder = RunFolder.of_run(config.output_dir, config.run_name, config.checkpoint_url)
    if outer is None or outer.rank == 0:
        for notice in loaded.notices:
            note(notice)
    if loaded.dry_run:
        return EXIT_OK if outer is not None and outer.rank != 0 else _dry_run(config, folder)
    if outer is not None:
        return _run_as_rank(config, folder, outer)
    processes = _number_of_processes(config)
    run_folder.check_usable(folder, resume=config.resume is not None, clean=config.clean)
    with run_folder.lock(folder) as held:
        return _start(config, folder, processes, held)


def _start(config: SFTConfig, folder: RunFolder, processes: int, held: int) -> int:
    """Prepare the folder, and train in this process or in `processes` of its own."""
    config_path, attempt = _prepare(config, folder)
    if processes == 1:
        if config.deployment.num_threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(config.deployment.num_threads)
        return _train_here(config_path, attempt)
    return launch(
        LaunchSpec(
            command=[sys.executable, "-m", "trainer", str(config_path.absolute()), str(attempt.absolute())],
            num_processes=processes,
            attempt_dir=attempt.absolute(),
            num_threads=config.deployment.num_threads or max(1, num_cores() // processes),
            grace_seconds=config.grace_seconds,
        ),
        keep_open=(held,),
    )


def _number_of_processes(config: SFTConfig) -> int:
    """Processes to start on this machine; a number that was not set is checked like one that was.

    Raises:
        ConfigError: the batch or the mesh does not fit the number of GPUs.
    """
    deployment = config.deployment
    if deployment.num_processes is not None:
        return deployment.num_processes
    processes = default_processes(deployment.device, count_gpus())
    _check_processes(config, processes, "one per GPU" if processes > 1 else "default")
    return processes


def _check_processes(config: SFTConfig, processes: int, origin: str) -> None:
    with_values(config, {"deployment.num_processes": processes}, origin=origin, prog="sft")


def _prepare(config: SFTConfig, folder: RunFolder) -> tuple[Path, Path]:
    """Check, clean and create the run folder; returns the configuration's file and the attempt's folder."""
    attempt = prepare(config, folder, command="sft", check_inputs=lambda: _check_inputs(config))
    return attempt / "sft.toml", attempt


def _check_inputs(config: SFTConfig) -> None:
    """Refuse local paths that lead nowhere, before `clean` deletes a run. The trainer looks closer.

    Raises:
        DataError, ModelError: there is no such file or folder.
        CheckpointError: the package that the store of `ckpt.url` needs is not installed.
    """
    check_model_and_store(config)
    from trainer.source.reading import open_rows

    for section, source in (("data", config.data), ("validation", config.validation)):
        if isinstance(source, ChatSourceConfig) and source.is_local:
            open_rows(source, section=section)


def _dry_run(config: SFTConfig, folder: RunFolder) -> int:
    """Write the resolved configuration and say what a real run would do with the folder."""
    _number_of_processes(config)
    prefix = dry_run_prefix(config, folder, lambda: _check_inputs(config))
    path = run_folder.write_config(folder, resolved(config, "sft"), f"{prefix or 'sft'}.toml")
    print(f"the configuration is valid; resolved: {path}")
    return EXIT_OK


def _run_as_rank(config: SFTConfig, folder: RunFolder, outer: OuterRank) -> int:
    """Run as one rank of an outer torchrun. Only rank 0 decides about the folder and writes there."""
    asked = config.deployment.num_processes
    if asked is not None and asked != outer.local_world_size:
        raise ConfigError(
            f"deployment.num_processes = {asked}, but torchrun started {outer.local_world_size} processes on "
            f"this machine; remove deployment.num_processes or start torchrun with --nproc-per-node {asked}"
        )
    _check_processes(
        config.model_copy(
            update={"deployment": config.deployment.model_copy(update={"num_processes": None})}
        ),
        outer.world_size,
        "WORLD_SIZE of torchrun",
    )
    with run_folder.lock(folder) if outer.rank == 0 else nullcontext():
        return _train_here(*_prepare_as_rank(config, folder, outer))


def _prepare_as_rank(config: SFTConfig, folder: RunFolder, outer: OuterRank) -> tuple[Path, Path]:
    """The configuration's file and the attempt's folder, which rank 0 creates and the others wait for."""
    if outer.rank != 0:
        attempt = _attempt_of_rank_0(folder, outer)
        return attempt / "sft.toml", attempt
    config_path, attempt = _prepare(config, folder)
    partial = attempt / "outer.partial"
    partial.write_text(json.dumps({"launch_id": outer.launch_id}))
    partial.replace(attempt / "outer.json")  # the others read it as soon as it is there
    return config_path, attempt


def _attempt_of_rank_0(folder: RunFolder, outer: OuterRank) -> Path:
    """The attempt's folder that rank 0 of this launch creates.

    Raises:
        RunFolderError: it does not appear within a minute.
    """
    started = time.time()
    while time.time() < started + _PEER_SECONDS:
        for path in sorted(
            folder.logs.glob("attempt_*/outer.json"), key=lambda path: path.stat().st_mtime, reverse=True
        ):
            # An earlier launch may have had the same address and port: its folder is older than this process.
            if (
                path.stat().st_mtime > started - _PEER_SECONDS
                and json.loads(path.read_text())["launch_id"] == outer.launch_id
            ):
                return path.parent
        time.sleep(0.1)
    raise RunFolderError(
        f"rank 0 made no attempt folder in {folder.logs} within {_PEER_SECONDS:g} s. Either it failed "
        "(see its output), or output_dir is not on a file system that all machines share"
    )


def _train_here(config_path: Path, attempt: Path) -> int:
    with undisturbed_import():
        from trainer import cli  # imports torch

    return cli.run(config_path, attempt)
