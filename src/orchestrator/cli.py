"""The orchestrator's process from its configuration file to its exit code.

Owns the order of opening and closing, the signals, and the exit record that the launcher reads. SIGINT and
SIGTERM end it at once: it has nothing to save.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from contract.attempt import record_exit, register_rank, write_whole
from contract.errors import EXIT_OK, Interrupted, exit_code_of
from contract.model_files import ModelSource, resolve_model
from contract.settings.load import load_settings
from orchestrator.background import LoopLag
from orchestrator.build import build_pipeline
from orchestrator.config import OrchestratorConfig
from telemetry.log import configure_logging, report_error

logger = logging.getLogger(__name__)

NAME = "orchestrator"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STANDSTILL_SECONDS = 300.0
"""An event loop that does not turn for so long never will: the process ends, with the place it stands at."""


def run(config_path: Path, attempt_dir: Path) -> int:
    """Sample for the run; the exit code is 0, or that of the error or signal that ended it.

    Args:
        config_path: resolved configuration of the orchestrator.
        attempt_dir: `logs/attempt_K` of this launch.
    """
    debug = False
    try:
        with _signals_interrupt():
            register_rank(attempt_dir, NAME)
            config = load_settings(
                OrchestratorConfig, ["@", str(config_path)], prog=NAME, description=""
            ).settings
            debug = config.log.level == "debug"
            if not config.model.trust_remote_code:  # a tokenizer's own code may want anything
                _keep_torch_out()
            # What it prints is in orchestrator.log; this one has everything.
            log_file = attempt_dir / f"{NAME}_debug.log"
            configure_logging(config.log.level, rank=0, log_file=log_file, console=True)
            # Not in the event loop, where a signal would wait for the end of a download or a conversion.
            files = resolve_model(config.model)
            asyncio.run(_run(config, files, attempt_dir))
    except BaseException as error:  # the exit record and the one message must come of every end
        # A disk that is full may be that of the record too: the error itself is told all the same.
        with suppress(OSError):
            record_exit(attempt_dir, NAME, exit_code_of(error), f"{error}" or type(error).__name__)
        return report_error(error, debug=debug)
    record_exit(attempt_dir, NAME, EXIT_OK, "")
    return EXIT_OK


def _keep_torch_out() -> None:
    """Make torch look as if it was not installed to all that this process imports.

    Of transformers it needs the tokenizer alone; with torch that takes ten times the memory and seconds to
    import. Code of environments runs in other processes, which have torch.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers would point it out
    sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType] - the language's own way


async def _run(config: OrchestratorConfig, files: ModelSource, attempt_dir: Path) -> None:
    """Until the run is over, an error, or a signal (`Interrupted`)."""
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(_sample(config, files, attempt_dir))
    received: list[int] = []

    def end(signum: int) -> None:
        received.append(signum)
        work.cancel()

    for signum in _SIGNALS:
        loop.add_signal_handler(signum, end, signum)
    try:
        await work
    except asyncio.CancelledError:
        if not received:
            raise
        raise _interrupted(received[0]) from None
    finally:
        faulthandler.cancel_dump_traceback_later()


async def _sample(config: OrchestratorConfig, files: ModelSource, attempt_dir: Path) -> None:
    def beat() -> None:
        faulthandler.dump_traceback_later(_STANDSTILL_SECONDS, exit=True)
        # The launcher's panel shows it; a disk that is full is noticed by what must be written.
        with suppress(OSError):
            write_whole(attempt_dir / f"{NAME}.status.json", json.dumps(pipeline.status()))

    async with AsyncExitStack() as stack:
        pipeline = await build_pipeline(config, files, LoopLag(beat), stack)
        await pipeline.run()
    logger.info("the run is over: all %d batches were sampled and trained on", config.max_steps)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Outside the event loop signals raise `Interrupted` where they come."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise _interrupted(signum)

    former = {signum: signal.signal(signum, interrupt) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


def _interrupted(signum: int) -> Interrupted:
    return Interrupted(f"ended by {signal.Signals(signum).name}", signum)
