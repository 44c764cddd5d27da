"""Errors that a user can act on, and the exit codes of every command.

A `TailraceError` is shown as one message without a traceback (the traceback is in the log, and on the console
with `--log.level debug`). Any other exception is a defect of the project and keeps its traceback.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
"""Configuration or input that cannot work: nothing was started or changed."""
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


class Interrupted(TailraceError):
    """The run ended because of a signal; `signum` decides the exit code."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = EXIT_SIGNAL_BASE + signum
