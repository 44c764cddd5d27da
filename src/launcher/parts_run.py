"""What the commands `trainer`, `orchestrator` and `inference` do: run one part of an RL run alone, on any
machine.

Each reads the part's file in `<run>/config/`, which `rl` wrote (also with `--dry-run`), and runs the part in
this process; several ranks of the trainer run under `processes.launch`. The parts find each other by the
addresses in their files. A part joins the attempt of one that is running already; otherwise it begins one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from contract import control
from contract.attempt import read_pid, register_rank
from contract.entry import undisturbed_import
from contract.errors import EXIT_OK, RunFolderError, TailraceError
from contract.layout import RunFolder
from contract.settings.base import Settings
from contract.settings.dump import to_toml
from contract.settings.load import load_file, load_settings
from inference.config import InferenceConfig
from launcher import folder as run_folder
from launcher import store
from launcher.alive import send
from launcher.devices import count_gpus, default_processes
from launcher.output import lasting_console
from launcher.prepare import check_model_and_store, note
from launcher.processes import launch
from launcher.rl_start import run_id_of
from launcher.running import ORCHESTRATOR, SERVER, TRAINER
from launcher.spec import LaunchSpec, num_cores
from orchestrator.config import OrchestratorConfig
from trainer.config import RLTrainConfig

S = TypeVar("S", bound=Settings)


def run_trainer(argv: Sequence[str] | None = None) -> int:
    """All of the command `trainer`; returns the exit code."""
    return _run_part(RLTrainConfig, argv, TRAINER, "The trainer of an RL run, alone.", _train)


def run_orchestrator(argv: Sequence[str] | None = None) -> int:
    """All of the command `orchestrator`; returns the exit code."""
    return _run_part(OrchestratorConfig, argv, ORCHESTRATOR, "The orchestrator of an RL run, alone.", _sample)


def run_inference(argv: Sequence[str] | None = None) -> int:
    """All of the command `inference`; returns the exit code."""
    return _run_part(InferenceConfig, argv, SERVER, "A policy server.", _serve)


def run_ranks(path: Path, attempt: Path) -> int:
    """The ranks of the trainer, under `rl`; returns the exit code.

    Args:
        path: configuration of the trainer.
        attempt: `logs/attempt_K` of this launch.
    """
    config = load_file(RLTrainConfig, path)
    processes = config.deployment.num_processes
    assert processes is not None, "rl fills it in"
    return _launch_ranks(config, path, attempt, processes)


def _run_part(
    cls: type[S], argv: Sequence[str] | None, name: str, description: str, run: Callable[[S], int]
) -> int:
    with lasting_console():
        try:
            loaded = load_settings(
                cls, sys.argv[1:] if argv is None else argv, prog=name, description=description
            )
            for notice in loaded.notices:
                note(notice)
            if loaded.dry_run:
                print("the configuration is valid")
                return EXIT_OK
            return run(loaded.settings)
        except TailraceError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code


def _train(config: RLTrainConfig) -> int:
    folder = RunFolder.of_run(config.output_dir, config.run_name, config.checkpoint_url)
    processes = config.deployment.num_processes or default_processes(config.deployment.device, count_gpus())
    run_folder.check_usable(folder, resume=config.resume is not None, clean=config.clean)
    with run_folder.lock(folder) as held:
        control.clear(folder)
        check_model_and_store(config)
        store.check_usable(folder, resume=config.resume is not None, clean=config.clean)
        if config.clean:
            _check_alone(folder)
            store.clean_steps(folder)
            run_folder.clean_run(folder)
        folder.paused.unlink(missing_ok=True)
        path, attempt = _enter(config, folder, TRAINER)
        if processes == 1:
            if config.deployment.num_threads is not None:
                os.environ["OMP_NUM_THREADS"] = str(config.deployment.num_threads)
            with undisturbed_import():
                from trainer.cli import run  # imports torch

            return run(path, attempt)
        return _launch_ranks(config, path, attempt, processes, keep_open=(held,))


def _sample(config: OrchestratorConfig) -> int:
    from orchestrator.cli import run

    return run(*_enter(config, RunFolder.of_run(config.output_dir, config.run_name, None), ORCHESTRATOR))


def _serve(config: InferenceConfig) -> int:
    if config.num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
    from inference.cli import run

    return run(config)


def _enter(config: Settings, folder: RunFolder, name: str) -> tuple[Path, Path]:
    """The part's configuration in the folder of an attempt, and that folder."""
    run_folder.check_writable(folder)
    run_id_of(folder)
    latest = folder.logs / "latest"
    joins = latest.is_dir() and _live_parts(latest) and not (latest / f"{name}.toml").exists()
    attempt = (latest.resolve() if joins else run_folder.new_attempt(folder)).absolute()
    register_rank(attempt, name)  # before anything slow, so that another part finds it
    path = attempt / f"{name}.toml"
    text = to_toml(config, header="What this attempt was started with.")
    run_folder.write_text(path, text, private=getattr(config, "server_key", None) is not None)
    return path, attempt


def _check_alone(folder: RunFolder) -> None:
    """Refuse to delete a run whose other parts would go on in what is deleted.

    Raises:
        RunFolderError: one of them runs on this machine.
    """
    latest = folder.logs / "latest"
    for name, pid in _live_parts(latest).items():
        raise RunFolderError(
            f"the {name} of the run in {folder.root} is running (process {pid}, of {latest.resolve()}), and "
            f"--clean would delete its files; nothing was deleted. End it first: kill {pid}"
        )


def _live_parts(attempt: Path) -> dict[str, int]:
    """The parts of the attempt that run on this machine, and their processes."""
    pids = {name: read_pid(attempt, name) for name in (TRAINER, ORCHESTRATOR)}
    return {name: pid for name, pid in pids.items() if pid is not None and send(pid, 0)}


def _launch_ranks(
    config: RLTrainConfig, path: Path, attempt: Path, processes: int, *, keep_open: tuple[int, ...] = ()
) -> int:
    return launch(
        LaunchSpec(
            command=[sys.executable, "-m", "trainer", str(path), str(attempt)],
            num_processes=processes,
            attempt_dir=attempt,
            num_threads=config.deployment.num_threads or max(1, num_cores() // processes),
            grace_seconds=config.grace_seconds,
        ),
        keep_open=keep_open,
    )
