"""What the built-in environments share: tasks from a seed, two splits without a task in common, answers."""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from contract.errors import ConfigError
from orchestrator.environment.base import MAX_TASKS, Environment, Message

_TEST_SHARE = 5
"""One of this many possible tasks belongs to the test split."""
_MAX_DRAWS = 10_000
_MAX_DIGITS = 40
_NUMBER = re.compile(rf"(?<![0-9.])-?[0-9]{{1,{_MAX_DIGITS}}}(?![0-9]|\.[0-9])")


class Generated(Environment):
    """Tasks made from a seed.

    The split of a task is decided by a hash of its content. So no task is in both splits, whatever the seeds,
    the numbers of tasks and the other settings; within a split a task may come twice.
    """

    def __init__(self, split: str, num_tasks: int, seed: int) -> None:
        """See the environments; raises ConfigError if there is no task of this split."""
        self.split = one_of("split", split, ("train", "test"))
        self.num_tasks = whole("num_tasks", num_tasks, 1, MAX_TASKS)
        self.seed = whole("seed", seed, 0, 2**62)

    def __len__(self) -> int:
        return self.num_tasks

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """One task of either split."""
        raise TypeError(f"{type(self).__name__} draws no tasks: define draw(rng)")

    def task(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self.num_tasks:
            raise IndexError(f"task {index} of {self.num_tasks}")
        rng = random.Random(f"{type(self).__name__} {self.seed} {index}")
        for _ in range(_MAX_DRAWS):
            task = self.draw(rng)
            if split_of(task) == self.split:
                return task
        raise ConfigError(
            f"these settings leave no task for split = {self.split!r}: allow more lengths, digits or letters"
        )


def split_of(task: Mapping[str, Any]) -> str:
    """`train` or `test`, by a hash of the task's content."""
    digest = hashlib.blake2b(json.dumps(task, sort_keys=True).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % _TEST_SHARE == 0 else "train"


def user(content: str) -> Message:
    """A message to the policy."""
    return {"role": "user", "content": content}


def answer_of(messages: Sequence[Message]) -> str:
    """The text of the policy's last turn, without space, quotes and full stops around it."""
    content = messages[-1].get("content") if messages[-1]["role"] == "assistant" else None
    return (content or "").strip(" \t\r\n.\"'`*")


def last_number(text: str) -> int | None:
    """The last whole number in `text`, or None. `1,234` is one; of `3.5` there is none."""
    numbers = _NUMBER.findall(re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text))
    return int(numbers[-1]) if numbers else None


def similarity(answer: Sequence[str], expected: Sequence[str]) -> float:
    """1 if equal, 0 if they share nothing: the matched share of both (difflib's ratio)."""
    # What is far too long is bad in any case, and the comparison would take a time that grows with it.
    longest = 8 * len(expected) + 64
    if len(answer) > longest:
        return similarity(answer[:longest], expected) * longest / len(answer)
    return difflib.SequenceMatcher(None, answer, expected, autojunk=False).ratio()


def whole(name: str, value: Any, low: int, high: int) -> int:
    """`value`, if it is a whole number from `low` to `high`; otherwise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"settings.{name} = {value!r}; it must be a whole number from {low} to {high}")
    return value


def span(low_name: str, low: Any, high_name: str, high: Any, smallest: int, largest: int) -> tuple[int, int]:
    """Two whole numbers, the first not above the second; otherwise ConfigError."""
    low, high = whole(low_name, low, smallest, largest), whole(high_name, high, smallest, largest)
    if low > high:
        raise ConfigError(f"settings.{low_name} = {low} is above settings.{high_name} = {high}")
    return low, high


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """`value`, if it is one of `choices`; otherwise ConfigError."""
    if value not in choices:
        raise ConfigError(f"settings.{name} = {value!r}; it must be one of {', '.join(choices)}")
    return value


def distinct(name: str, value: Any, smallest: int, allowed: str | None = None) -> str:
    """`value`, if it is a str of at least `smallest` characters, all different; otherwise ConfigError.

    Args:
        allowed: the characters that it may have; None allows any but white space.
    """
    good = isinstance(value, str) and len(value) >= smallest and len(set(value)) == len(value)
    if not good or any(c.isspace() if allowed is None else c not in allowed for c in value):
        which = "characters" if allowed is None else f"characters of {allowed!r}"
        raise ConfigError(f"settings.{name} = {value!r}; it must be {smallest} or more different {which}")
    return value
