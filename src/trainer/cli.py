"""One training process from its configuration file to its exit code.

Owns the order of opening and closing: signals, process group, run; and the exit record that the launcher
    reads.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

from contract.attempt import record_exit, register_rank
from contract.control import PausedMark, mark_paused
from contract.errors import ConfigError, exit_code_of
from contract.layout import RunFolder
from contract.settings.load import load_settings
from telemetry.format import format_duration
from telemetry.log import configure_logging, report_error
from trainer.build import Run, build_run, run_folder
from trainer.checkpoint.inflight import is_writing
from trainer.config import RLTrainConfig, SFTConfig, TrainConfig
from trainer.loop import Outcome
from trainer.parallel.process import open_process
from trainer.parallel.stop import Requests, handle_signals

logger = logging.getLogger(__name__)

_KINDS: dict[str, type[TrainConfig]] = {"sft.toml": SFTConfig, "trainer.toml": RLTrainConfig}
"""The name of the configuration's file says of which kind the run is."""

_RESULTS = {"reward/mean": "last reward", "loss": "last loss", "validation/loss": "validation loss"}
"""Metrics that the end summary shows, and their titles."""


def run(config_path: Path, attempt_dir: Path) -> int:
    """Train as this rank; the exit code is 0, or that of the error or signal that ended the run.

    Does not return, but ends the process with that code, if it leaves a write behind that was given up.

    Args:
        config_path: resolved configuration of the run: `sft.toml`, or `trainer.toml` for RL.
        attempt_dir: `logs/attempt_K` of this launch.
    """
    code = _run(config_path, attempt_dir)
    if is_writing():
        # The interpreter ends such threads in the middle of C++, which aborts the process.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(config_path: Path, attempt_dir: Path) -> int:
    rank = int(os.environ.get("RANK", "0"))
    register_rank(attempt_dir, rank)
    try:
        config = _load(config_path)
    except ConfigError as error:
        record_exit(attempt_dir, rank, error.exit_code, str(error))
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    log_file = attempt_dir / f"trainer_{rank}.log"
    configure_logging(config.log.level, rank=rank, log_file=log_file, console=True)
    attempt = int(attempt_dir.name.rpartition("_")[2])

    folder = run_folder(config)
    requests = Requests(folder, can_save=config.ckpt is not None, max_minutes=config.max_minutes)

    def on_immediate_end(code: int, reason: str) -> None:
        record_exit(attempt_dir, rank, code, reason)

    def record(error: BaseException) -> None:
        # A disk that is full may be that of the record too: the error itself is told all the same.
        with suppress(OSError):
            record_exit(attempt_dir, rank, exit_code_of(error), f"{error}" or type(error).__name__)

    with handle_signals(requests, on_immediate_end, grace_seconds=config.grace_seconds):
        try:
            code = _train(config, folder, attempt, requests, record)
        except BaseException as error:  # the exit record and the one message must come of every end
            record(error)
            return report_error(error, debug=config.log.level == "debug")
        record_exit(attempt_dir, rank, code, "")
        return code


def _load(path: Path) -> TrainConfig:
    """The configuration in `path`.

    Raises:
        ConfigError: it is not valid, or the file has another name than those of `_KINDS`.
    """
    kind = _KINDS.get(path.name)
    if kind is None:
        raise ConfigError(
            f"{path}: the name of a trainer's configuration says which kind of training it is for; it is "
            f"one of {', '.join(_KINDS)}"
        )
    return load_settings(kind, ["@", str(path)], prog="trainer", description="").settings


def _train(
    config: TrainConfig,
    folder: RunFolder,
    attempt: int,
    requests: Requests,
    on_error: Callable[[BaseException], None],
) -> int:
    deployment = config.deployment
    with open_process(
        deployment.device,
        num_threads=deployment.num_threads,
        timeout_seconds=deployment.collective_timeout_seconds,
        write_timeout_seconds=config.ckpt.write_timeout_seconds if config.ckpt is not None else None,
    ) as process:
        with ExitStack() as stack:
            try:
                run = build_run(config, process, requests, folder, attempt, stack)
                outcome = run.loop.fit()
                if outcome.ending and process.is_main:
                    _mark_paused(config, folder, run, outcome)
            except BaseException as error:
                # Before anything is closed: peers that lose their connection to this rank must not seem
                # the first to fail.
                on_error(error)
                raise
            heading = "Stopped" if outcome.signum else "Paused" if outcome.ending else "Done"
            run.console.finish(_end_summary(config, run, outcome, folder), heading=heading)
        # The first rank that exits makes torchrun end the others: leave together, after everything is closed.
        process.barrier()
    return outcome.exit_code


def _mark_paused(config: TrainConfig, folder: RunFolder, run: Run, outcome: Outcome) -> None:
    """Leave the mark of a run that goes on with `resume`, now that its last step is committed."""
    is_saved = config.ckpt is not None and outcome.steps_done > 0
    mark_paused(folder, PausedMark(run.state.step, outcome.ending, is_saved, f"{datetime.now(UTC):%FT%TZ}"))


def _end_summary(config: TrainConfig, run: Run, outcome: Outcome, folder: RunFolder) -> dict[str, str]:
    state, values = run.state, run.reporter.last_values
    rows = {"steps": f"{state.step:,} of {run.total_steps:,} ({outcome.steps_done:,} in this attempt)"}
    if not outcome.steps_done and not outcome.ending:
        rows["steps"] += ": the run was complete already, nothing was trained"
    rows["tokens"] = f"{state.num_tokens:,}"
    for name, title in _RESULTS.items():
        value = values.get(name)
        if value is not None:
            rows[title] = f"{value:.4f}"
    rows |= {
        f"evaluation of {name.split('/')[1]}": f"mean reward {value:.4f}"
        for name, value in values.items()
        if name.startswith("eval/") and name.endswith("/mean") and value is not None
    }
    if state.num_skipped:
        rows["skipped updates"] = (
            f"{state.num_skipped:,} (loss or gradient was not finite, or no token had a loss)"
        )
    rows["time"] = format_duration(run.seconds())
    rows["folder"] = str(folder.root)
    if outcome.ending:
        rows["stopped" if outcome.signum else "paused"] = (
            f"by {outcome.ending}; {_what_is_left(config, outcome)}"
        )
    return rows


def _what_is_left(config: TrainConfig, outcome: Outcome) -> str:
    """After an end before the run was complete."""
    if config.ckpt is None:
        return "nothing was saved (--no-ckpt)"
    if not outcome.steps_done:
        return "nothing was trained in this attempt; go on with --resume"
    return "saved; go on with --resume"
