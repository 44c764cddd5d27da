"""What an environment is: tasks, the conversation about each, and its reward.

An environment is stateless between calls: everything about an episode is in its task, its messages and its
`state`, which travel with every call. So any worker process can serve any call, and a worker that is killed
loses one call and no episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
"""`{"role": "user", "content": "..."}` as chat templates take it; an assistant's may have `tool_calls`."""

MAX_TASKS = 50_000_000
"""Of a source: the order of its tasks is in memory."""
MAX_REWARD = 1e30
"""Farthest from 0: sums and squares of rewards stay finite, and so do advantages in float32."""

Reward = float | Mapping[str, float]
"""One number; or several by name, of which `reward` counts and the others are logged."""


class Environment:
    """Base of environments; a subclass overrides what it needs.

    Settings of the source come as keyword arguments of the constructor; give them defaults.
    """

    max_turns: int = 1
    """Turns of the policy in one episode; with 1 `respond` is never called."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools for the chat template: JSON schemas of functions, as transformers takes them."""

    def __len__(self) -> int:
        """Number of tasks."""
        raise TypeError(f"{type(self).__name__} does not say how many tasks it has: define __len__")

    def task(self, index: int) -> Mapping[str, Any]:
        """The task `index` as JSON values; the same at every call."""
        raise TypeError(f"{type(self).__name__} has no tasks: define task(index)")

    def start(self, task: Mapping[str, Any]) -> list[Message]:
        """The messages that an episode begins with."""
        raise TypeError(f"{type(self).__name__} does not say how an episode begins: define start(task)")

    def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> list[Message] | Awaitable[list[Message] | None] | None:
        """The messages that follow the policy's last turn, or None at the end of the episode.

        Args:
            messages: all so far; the last is the policy's.
            state: JSON values of this episode, to read and change; empty at first.
        """
        return None

    def reward(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> Reward | Awaitable[Reward]:
        """What the finished episode is worth. An exception is no reward: the episode is left out."""
        raise TypeError(f"{type(self).__name__} has no reward: define reward(task, messages, state)")
