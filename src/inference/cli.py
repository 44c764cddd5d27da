"""One policy server from its configuration to its exit code.

Owns the order of opening and closing: socket, engine, HTTP; signals; and that the process ends, whatever
hangs. A busy port is found before the model is loaded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from contract.attempt import record_exit, register_rank, write_whole
from contract.entry import undisturbed_import
from contract.errors import EXIT_SIGNAL_BASE, Interrupted, PolicyServerError, TailraceError, exit_code_of
from contract.settings.load import load_file
from inference.config import InferenceConfig
from inference.engine.base import Engine
from inference.server import HttpServer, address_error, bind, build_app
from inference.service import OpenUpdate, PolicyService, describe
from telemetry.log import configure_logging, log_to_file, report_error

logger = logging.getLogger(__name__)

PART = "inference"
"""Name of this process in the folder of an attempt."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# After the first signal: running requests may finish, then they are aborted and answered; then the process
# ends even if a thread hangs, e.g. in a broadcast whose sender is gone.
_FINISH_SECONDS = 1.0
_ANSWER_SECONDS = 3
_END_SECONDS = 10.0
_NUM_FILES = 65536


@dataclass(frozen=True, slots=True)
class Served:
    """What a server serves.

    Attributes:
        end_ids: tokens that end an answer of the OpenAI routes.
        close: releases what `open_update` keeps.
    """

    engine: Engine
    open_update: OpenUpdate
    end_ids: frozenset[int]
    close: Callable[[], None]


Load = Callable[[InferenceConfig], Served]

OnStatus = Callable[[dict[str, int]], None]

OnEnd = Callable[[int, str], None]
"""Told the exit code, and what went wrong in words (empty if nothing did)."""


def run(
    config: InferenceConfig,
    *,
    on_status: OnStatus | None = None,
    on_end: OnEnd | None = None,
    load: Load | None = None,
    end_seconds: float = _END_SECONDS,
) -> int:
    """Serve until SIGINT or SIGTERM; on the main thread.

    A first signal lets running requests finish for a second, aborts the rest and ends; a second one ends the
    process at once.

    Args:
        on_status: called several times a second with what the server is at, by name.
        on_end: called before this returns, or before the process is ended.
        load: makes the engine; None loads what `config` says.
        end_seconds: from the first signal, or the error that ends the server, to the end of the process if it
            does not end by itself.

    Returns:
        128 + the signal's number, or the code of the error that ended the server.
    """
    configure_logging(config.log.level, rank=0, log_file=config.log_file, console=True)
    tell_end = on_end or (lambda code, message: None)
    ending = _Ending(tell_end, end_seconds)
    try:
        with ending.during_start():
            signum = _serve(config, load or _load, on_status or (lambda status: None), ending)
    except BaseException as error:  # the record and the one message must come of every end
        tell_end(exit_code_of(error), f"{error}" or type(error).__name__)
        return report_error(error, debug=config.log.level == "debug")
    finally:
        ending.cancel_limit()
    tell_end(EXIT_SIGNAL_BASE + signum, f"ended by {signal.Signals(signum).name}")
    return EXIT_SIGNAL_BASE + signum


def run_part(
    config_path: Path, attempt_dir: Path, *, load: Load | None = None, end_seconds: float = _END_SECONDS
) -> int:
    """Serve as the policy server of a run; its exit is recorded in the folder of the attempt.

    Does not return, but ends the process with the exit code, if a thread hangs.

    Args:
        config_path: resolved configuration of this process.
        attempt_dir: `logs/attempt_K` of this launch.
        load, end_seconds: see `run`.
    """
    register_rank(attempt_dir, PART)

    def record(code: int, message: str) -> None:
        # A disk that is full may be that of the record too: the error itself is told all the same.
        with suppress(OSError):
            record_exit(attempt_dir, PART, code, message)

    def show(status: dict[str, int]) -> None:
        # For the launcher's panel; a disk that is full ends no server.
        with suppress(OSError):
            write_whole(attempt_dir / f"{PART}.status.json", json.dumps(status))

    try:
        config = load_file(InferenceConfig, config_path)
    except BaseException as error:
        record(exit_code_of(error), f"{error}" or type(error).__name__)
        return report_error(error, debug=False)
    code = run(config, on_status=show, on_end=record, load=load, end_seconds=end_seconds)
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        # The interpreter would wait for them.
        _exit(code)
    return code


class _Ending:
    """Signals and the time limit of the end."""

    def __init__(self, on_end: OnEnd, end_seconds: float) -> None:
        self._on_end = on_end
        self._end_seconds = end_seconds
        self._limit: threading.Timer | None = None

    @contextmanager
    def during_start(self) -> Iterator[None]:
        """Signals raise `Interrupted`, until the event loop takes them."""
        previous = {signum: signal.signal(signum, self._interrupt) for signum in _SIGNALS}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def on_loop(self) -> asyncio.Future[int]:
        """Done with the first signal; a second one ends the process."""
        loop = asyncio.get_running_loop()
        first: asyncio.Future[int] = loop.create_future()

        def receive(signum: int) -> None:
            if first.done():
                self._on_end(EXIT_SIGNAL_BASE + signum, "ended at once by a second signal")
                _exit(EXIT_SIGNAL_BASE + signum)
            first.set_result(signum)

        for signum in _SIGNALS:
            loop.add_signal_handler(signum, receive, signum)
        return first

    def limit(self, code: int, message: str) -> None:
        """End the process with `code` if it does not end by itself."""

        def end() -> None:
            late = f"{message}; what was going on did not end within {self._end_seconds:g} s"
            # Not through the logging, whose locks a thread that hangs may hold.
            os.write(2, f"{late}\n".encode())
            self._on_end(code, late)
            _exit(code)

        self._limit = threading.Timer(self._end_seconds, end)
        self._limit.daemon = True
        self._limit.start()

    def cancel_limit(self) -> None:
        """It has ended by itself."""
        if self._limit is not None:
            self._limit.cancel()

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        raise Interrupted(f"ended by {signal.Signals(signum).name} while the policy server started", signum)


def _serve(
    config: InferenceConfig,
    load: Load,
    on_status: OnStatus,
    ending: _Ending,
) -> int:
    """Returns the signal that ended the server."""
    _allow_connections()
    listener = bind(config.host, config.port)
    with listener:
        served = load(config)
        return asyncio.run(_serve_engine(config, served, listener, on_status, ending))


async def _serve_engine(
    config: InferenceConfig,
    served: Served,
    listener: socket.socket,
    on_status: OnStatus,
    ending: _Ending,
) -> int:
    engine = served.engine
    service = PolicyService(engine, served.open_update, pause_mode=config.pause_mode, run_id=config.run_id)
    name = config.served_name or config.model.name
    app = build_app(service, served_name=name, end_ids=served.end_ids, api_key=config.api_key)
    host, port = listener.getsockname()[:2]

    def on_started() -> None:
        logger.info(
            "policy server: %s, version %d, at http://%s:%d", name, service.weights.version, host, port
        )

    def look() -> None:
        stats = engine.stats()
        on_status(
            {
                "version": service.weights.version,
                "running": stats.num_running,
                "waiting": service.num_waiting,
                "tokens": stats.num_drawn_tokens,
            }
        )

    server = HttpServer(app, end_seconds=int(_FINISH_SECONDS) + _ANSWER_SECONDS, on_started=on_started)
    signalled = ending.on_loop()
    serving = asyncio.create_task(server.serve([listener]))
    watching = asyncio.create_task(service.watch(look))
    await asyncio.wait({serving, watching, signalled}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if watching.done():
            raise _failed(watching.result())
        if serving.done():
            raise _unserved(config, port, serving.exception())
        signum = signalled.result()
        reason = f"ended by {signal.Signals(signum).name}"
        ending.limit(EXIT_SIGNAL_BASE + signum, reason)
        logger.info("the policy server is %s; a second signal ends it at once", reason)
        service.close(reason)
        return signum
    except TailraceError as error:
        ending.limit(error.exit_code, str(error))
        service.close(str(error))
        raise
    finally:
        watching.cancel()
        server.stop()
        await asyncio.wait({serving}, timeout=_FINISH_SECONDS)
        try:
            await engine.close()
            await asyncio.to_thread(served.close)
        except Exception as error:
            logger.warning("what the server holds cannot be released: %s: %s", type(error).__name__, error)
        await asyncio.gather(serving, return_exceptions=True)


def _failed(failure: BaseException) -> PolicyServerError:
    message = f"the policy server ends: {describe(failure)}"
    log_to_file(logger, message, level=logging.ERROR, error=failure)
    error = PolicyServerError(message)
    error.__cause__ = failure
    return error


def _unserved(config: InferenceConfig, port: int, error: BaseException | None) -> TailraceError:
    """Another process may have begun to listen on our port after both had bound it."""
    if isinstance(error, OSError):
        return address_error(config.host, port, error)
    ended = PolicyServerError("the HTTP server ended, though nobody told it to")
    ended.__cause__ = error
    return ended


def _load(config: InferenceConfig) -> Served:
    # Seconds and torch: not before the port is ours.
    with undisturbed_import():
        from inference.engine.build import build_engine
        from inference.receive.build import WeightReceiver

    engine = build_engine(config)
    receiver = WeightReceiver(engine.device)
    return Served(engine, receiver.open_update, frozenset(engine.end_ids), receiver.close)


def _allow_connections() -> None:
    """Every waiting request holds a connection, and the usual limit of 1,024 files is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
