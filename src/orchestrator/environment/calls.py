"""The calls of an environment: user code is run, and what it returns is held to the protocol.

The one place that knows the protocol: the workers and the test kit both call through it, and functions that
are `async` take the same way as others. Holds no process and no time limit.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.environment.base import MAX_REWARD, MAX_TASKS, Environment, Message

# Frames between this package and user code tell a user nothing.
_SKIPPED_FOLDERS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
_NUM_FRAMES = 6
_ROLES = ("system", "user", "assistant", "tool")


class ProtocolError(Exception):
    """An environment returned what it may not."""


class Caller:
    """Runs the functions of one environment, on the thread that calls.

    One event loop serves all `async` functions, so clients that they keep go on working between calls.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._name = type(environment).__name__
        self._runner: asyncio.Runner | None = None

    def close(self) -> None:
        """End the event loop, if there is one."""
        if self._runner is not None:
            self._runner.close()

    def describe(self) -> dict[str, Any]:
        """`num_tasks`, `max_turns` and `tools`.

        Raises:
            ProtocolError: one of them is not what it must be.
        """
        env, name = self.environment, self._name
        num_tasks, max_turns, tools = len(env), env.max_turns, env.tools
        if num_tasks < 1:
            raise ProtocolError(f"len({name}) is 0; there must be a task")
        if num_tasks > MAX_TASKS:
            raise ProtocolError(
                f"len({name}) is {num_tasks}; at most {MAX_TASKS} tasks can be put in order: give fewer, and "
                f"others with another seed"
            )
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ProtocolError(f"{name}.max_turns is {max_turns!r}; it must be a whole number from 1")
        if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
            raise ProtocolError(f"{name}.tools must be a list of JSON schemas, not {_kind(tools)}")
        if not all(isinstance(tool, Mapping) for tool in tools):
            raise ProtocolError(f"{name}.tools must hold JSON schemas, one mapping for each function")
        return {"num_tasks": num_tasks, "max_turns": max_turns, "tools": list(tools)}

    def task(self, index: int) -> Mapping[str, Any]:
        """The task `index`."""
        task = self._finish(self.environment.task(index))
        if not isinstance(task, Mapping):
            raise ProtocolError(f"{self._name}.task({index}) must return a mapping, not {_kind(task)}")
        return task

    def start(self, task: Mapping[str, Any]) -> list[Message]:
        """The messages that an episode begins with."""
        return self._messages("start", self._finish(self.environment.start(task)))

    def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> tuple[list[Message] | None, dict[str, Any]]:
        """The next messages, or None at the end; and the state after the call."""
        answer = self._finish(self.environment.respond(task, messages, state))
        return (None if answer is None else self._messages("respond", answer)), state

    def reward(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> dict[str, float]:
        """Rewards by name, `reward` among them; all finite."""
        found = self._finish(self.environment.reward(task, messages, state))
        by_name = found if isinstance(found, Mapping) else {"reward": found}
        if "reward" not in by_name:
            raise ProtocolError(
                f"{self._name}.reward must return a number, or a mapping with the key 'reward'; it returned "
                f"the keys {sorted(map(str, by_name))}"
            )
        return {str(key): self._number(str(key), value) for key, value in by_name.items()}

    def _number(self, key: str, value: Any) -> float:
        # numpy's and torch's scalars are numbers as well; a str or None has no __float__.
        if not hasattr(value, "__float__"):
            raise ProtocolError(f"{self._name}.reward gave {_kind(value)} for {key!r}, not a number")
        number = float(value)
        if not abs(number) <= MAX_REWARD:  # so is NaN refused
            raise ProtocolError(
                f"{self._name}.reward gave {number} for {key!r}; a reward must be finite, from "
                f"{-MAX_REWARD:g} to {MAX_REWARD:g}"
            )
        return number

    def _messages(self, function: str, messages: Any) -> list[Message]:
        name = f"{self._name}.{function}"
        if not isinstance(messages, list | tuple):
            raise ProtocolError(f"{name} must return a list of messages, not {_kind(messages)}")
        if not messages:
            raise ProtocolError(f"{name} returned no message; respond returns None to end the episode")
        for message in messages:
            if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
                raise ProtocolError(
                    f"{name} returned {message!r:.200} as a message; one is a mapping with a `role` of "
                    f"{', '.join(_ROLES)} and a `content`"
                )
            if not isinstance(message.get("content"), str):
                raise ProtocolError(f"{name}: the `content` of a message must be a str: {message!r:.200}")
        if messages[-1]["role"] == "assistant":
            raise ProtocolError(f"{name}: the last message is the assistant's, but it is the policy's turn")
        return list(messages)

    def _finish(self, value: Any) -> Any:
        return self._run(value) if inspect.isawaitable(value) else value

    def _run(self, awaitable: Awaitable[Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def finish() -> Any:
            return await awaitable

        return self._runner.run(finish())


def short_traceback(error: BaseException) -> str:
    """Where in the user's code `error` came from: its last frames, without those that called it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if str(Path(frame.filename).parent) not in _SKIPPED_FOLDERS
        and not frame.filename.startswith("<frozen importlib")
    ]
    lines = traceback.format_list(theirs[-_NUM_FRAMES:])
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} ({value!r:.80})"
