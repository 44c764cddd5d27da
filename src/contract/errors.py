"""Errors that a user can act on, and the exit codes of every command.

A `TailraceError` is shown as one message without a traceback (the traceback is in the log, and on the console
with `--log.level debug`). Any other exception is a defect of the project and keeps its traceback.
"""

from __future__ import annotations

import signal

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
"""Configuration or input that cannot work: nothing was started or changed."""
EXIT_PAUSED = 75
"""A run that was asked to pause has saved and ended, and goes on with `--resume` (EX_TEMPFAIL of sysexits.h:
try again later)."""
EXIT_SIGNAL_BASE = 128
"""A run ended by a signal exits with 128 + the signal's number, after its checkpoint is committed."""


class TailraceError(Exception):
    """Base of all errors that are meant for the user."""

    exit_code = EXIT_FAILURE


class ConfigError(TailraceError, ValueError):
    """A setting is unknown, of the wrong type or contradicts another one."""

    exit_code = EXIT_USAGE


class DataError(TailraceError, ValueError):
    """Input data is missing, malformed or leaves nothing to train on."""

    exit_code = EXIT_USAGE


class ModelError(TailraceError, ValueError):
    """A model cannot be found, built or loaded as asked."""

    exit_code = EXIT_USAGE


class CheckpointError(TailraceError, RuntimeError):
    """A checkpoint is missing, incomplete, of another format or could not be written."""


class RunFolderError(TailraceError, RuntimeError):
    """The output folder cannot be used: it holds a run already, or cannot be written."""

    exit_code = EXIT_USAGE


class NonFiniteError(TailraceError, RuntimeError):
    """Loss or gradients are not finite and the run was told to stop then."""


class ChannelError(TailraceError, RuntimeError):
    """A message between processes is damaged, of another run, out of order, or did not come in time."""


class PublishError(TailraceError, RuntimeError):
    """New weights did not reach the policy server, which stays on the version before."""


class PolicyServerError(TailraceError, RuntimeError):
    """A policy server cannot be reached, or refuses a request."""


class EnvironmentFailure(TailraceError, RuntimeError):
    """An environment cannot be loaded, or too many of its episodes fail."""


class Interrupted(BaseException):
    """The run ended because of a signal; `signum` decides the exit code.

    Not an `Exception`: a signal handler raises it anywhere, also inside code that survives the errors of what
    it calls (a chat template that refuses a row, say) and would take the signal for one of them.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = EXIT_SIGNAL_BASE + signum


def is_asked_for(code: int) -> bool:
    """Whether a process with this exit code ended because it was asked to, by a pause or a signal."""
    return code in (EXIT_PAUSED, EXIT_SIGNAL_BASE + signal.SIGINT, EXIT_SIGNAL_BASE + signal.SIGTERM)


def is_expected(error: BaseException) -> bool:
    """Whether `error` is shown as one message, rather than as a defect of the project."""
    return isinstance(error, TailraceError | Interrupted)


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that `error` ends."""
    return error.exit_code if isinstance(error, TailraceError | Interrupted) else EXIT_FAILURE
