"""A worker process: constructs one environment, then serves its calls, one at a time, on the main thread.

Started by the pool as `python -m orchestrator.environment.worker FD PARENT`. What the environment prints goes
to standard error (the log of the orchestrator): the pool is reached over a socket of its own. Imports neither
torch nor transformers; user code may. The process ends with its parent, however that ends.

Messages, all JSON (see wire.py):

- first `{source, environment, settings}`; the answer is `["ready", {num_tasks, max_turns, tools}]`, or
  `["config" | "failure", message]`, after which the worker ends;
- then `[number, function, [arguments]]`; the answer is `[number, failure or None, result, seconds]`, where
  `seconds` is how long the environment's code took.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import Any

from contract.attempt import die_with_parent
from contract.errors import ConfigError
from orchestrator.environment.calls import Caller, ProtocolError, short_traceback
from orchestrator.environment.load import load_environment
from orchestrator.environment.wire import FrameSocket, encode_frame

FUNCTIONS = ("task", "start", "respond", "reward")
"""What a worker can be asked for."""


def main(arguments: list[str]) -> int:
    """Serve until the other side closes; returns the exit code."""
    descriptor, parent_pid = int(arguments[0]), int(arguments[1])
    die_with_parent(parent_pid, signal.SIGKILL)
    # Ctrl-C reaches the whole process group, but a worker serves until the orchestrator has decided how to
    # end. A handler rather than SIG_IGN, which programs that the environment starts would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    os.dup2(2, 1)
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection:
        channel = FrameSocket(connection)
        try:
            caller = _construct(channel)
            if caller is not None:
                _serve(channel, caller)
        except (BrokenPipeError, ConnectionResetError):
            return 0  # The pool has closed and waits for nothing any more.
    return 0


def _construct(channel: FrameSocket) -> Caller | None:
    """The environment, announced to the pool; None after an error, which the pool has been told."""
    request = channel.receive()
    if request is None:
        return None
    source = request["source"]
    try:
        caller = Caller(load_environment(source, request["environment"], request["settings"]))
        frame = encode_frame(["ready", caller.describe()])
    except ConfigError as error:
        channel.send(encode_frame(["config", str(error)]))
        return None
    except BaseException as error:  # sys.exit() in user code is a failure like any other
        message = f"source {source!r} ({request['environment']}): {_explain(error)}"
        channel.send(encode_frame(["failure", message]))
        return None
    channel.send(frame)
    return caller


def _serve(channel: FrameSocket, caller: Caller) -> None:
    functions = {name: getattr(caller, name) for name in FUNCTIONS}
    while (request := channel.receive()) is not None:
        number, function, arguments = request
        begin = time.perf_counter()
        failure, result = _call(functions[function], arguments)
        seconds = time.perf_counter() - begin
        try:
            frame = encode_frame((number, failure, result, seconds))
        except TypeError as error:
            name = type(caller.environment).__name__
            failure = f"{name}.{function} gave values that are not JSON: {error}"
            frame = encode_frame((number, failure, None, seconds))
        channel.send(frame)
    caller.close()


def _call(function: Any, arguments: list[Any]) -> tuple[str | None, Any]:
    try:
        return None, function(*arguments)
    except BaseException as error:  # sys.exit() in user code fails the call, not the worker
        return _explain(error), None


def _explain(error: BaseException) -> str:
    return str(error) if isinstance(error, ProtocolError) else short_traceback(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
