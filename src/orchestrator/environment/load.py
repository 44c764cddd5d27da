"""From `sources.environment` and `sources.settings` to an environment. Runs in worker processes."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from contract.errors import ConfigError
from orchestrator.environment.base import Environment

BUILT_IN: dict[str, str] = {
    "reverse-text": "orchestrator.environment.builtin.reverse_text:ReverseText",
    "sort-letters": "orchestrator.environment.builtin.sort_letters:SortLetters",
    "arithmetic": "orchestrator.environment.builtin.arithmetic:Arithmetic",
    "guess-number": "orchestrator.environment.builtin.guess_number:GuessNumber",
    "calculator": "orchestrator.environment.builtin.calculator:Calculator",
}
"""Import path of each built-in environment by its name."""


def load_environment(source: str, environment: str, settings: Mapping[str, Any]) -> Environment:
    """Import and construct an environment.

    Args:
        source: name of the source, for errors.
        environment: a built-in's name, or `package.module:Name` of a class, or of a function that returns an
            environment. Modules are also found in the current folder.

    Raises:
        ConfigError: it cannot be found, or does not take these settings.
        Exception: whatever its module or its constructor raises.
    """
    maker = _find(source, environment)
    _check_settings(source, environment, maker, settings)
    try:
        made = maker(**settings)
    except ValueError as error:
        if not isinstance(error, ConfigError) and _raised_inside(error):
            raise  # Not the constructor's own refusal: the traceback tells more than the message.
        raise ConfigError(f"source {source!r} ({environment}): {error}") from error
    if not isinstance(made, Environment):
        raise ConfigError(
            f"source {source!r}: {environment} made a {type(made).__name__}; it must be a subclass of "
            f"orchestrator.environment.Environment, or a function that returns one"
        )
    return made


def _find(source: str, environment: str) -> Callable[..., Any]:
    path = BUILT_IN.get(environment, environment)
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(
            f"source {source!r}: environment = {environment!r} is neither built in "
            f"({', '.join(BUILT_IN)}) nor an import path (package.module:Class)"
        )
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # The module is there, and fails to import another.
        raise ConfigError(
            f"source {source!r}: environment = {environment!r}, but there is no module {error.name!r} in "
            f"the current folder ({folder}) or among the installed packages"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"source {source!r}: environment = {environment!r}, but {found.__name__} has no {part!r}; "
                f"its environments: {', '.join(_environments(found)) or 'none'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"source {source!r}: {environment} is a {type(found).__name__}; it must be a class, or a "
            f"function that returns an environment"
        )
    return found


def _environments(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Environment) and value is not Environment
    ]


def _check_settings(
    source: str, environment: str, maker: Callable[..., Any], settings: Mapping[str, Any]
) -> None:
    """Refuse settings that the constructor does not take, before it runs."""
    try:
        signature = inspect.signature(maker)
    except ValueError as error:  # a type that is written in C
        raise ConfigError(f"source {source!r}: {environment} is no class or function of Python") from error
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise ConfigError(
            f"source {source!r}: {environment} does not take settings = {dict(settings)}: {error}; it "
            f"accepts {_accepted(signature)}. Set sources.settings"
        ) from error


def _accepted(signature: inspect.Signature) -> str:
    parameters = [
        str(parameter).partition(":")[0] + _default(parameter)
        for parameter in signature.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    return ", ".join(parameters) or "none"


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"


def _raised_inside(error: BaseException) -> bool:
    """Whether `error` comes from deeper than the constructor itself."""
    frame, depth = error.__traceback__, 0
    while frame is not None:
        frame, depth = frame.tb_next, depth + 1
    return depth > 2
