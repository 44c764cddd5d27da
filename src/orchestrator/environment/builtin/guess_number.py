"""`guess-number`: find a number in several turns, told after each whether it is higher or lower."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from orchestrator.environment.base import Message
from orchestrator.environment.builtin.generated import Generated, answer_of, last_number, user, whole

_HIGHEST = 999


class GuessNumber(Generated):
    """A task: "I think of a whole number from 37 to 46. Guess it. Answer with one number only."

    After a wrong guess the environment answers "Higher." or "Lower.", after a turn without a number in the
    range that it wants one. The last whole number of a turn counts as the guess.

    The reward is 1 if the number is found in as many turns as halving the range takes at most, falls to 0.5
    when it is found in the last turn, and is up to 0.3 if it is not found, by how near the last guess was.
    `found` and `turns` are logged beside it.

    Args:
        split: `train`, or `test` for held-out tasks.
        range_size: how many numbers are possible.
        max_turns: most guesses; None is two more than halving the range takes.
        num_tasks: number of tasks.
        seed: another seed gives other tasks.
    """

    def __init__(
        self,
        split: str = "train",
        range_size: int = 10,
        max_turns: int | None = None,
        num_tasks: int = 100_000,
        seed: int = 0,
    ) -> None:
        super().__init__(split, num_tasks, seed)
        self.range_size = whole("range_size", range_size, 2, 500)
        # Halving finds one of 2^k - 1 numbers in k guesses.
        self.par = range_size.bit_length()
        self.max_turns = self.par + 2 if max_turns is None else whole("max_turns", max_turns, 1, 100)
        self.task(0)

    def draw(self, rng: random.Random) -> dict[str, Any]:
        low = rng.randint(1, _HIGHEST - self.range_size + 1)
        high = low + self.range_size - 1
        return {"low": low, "high": high, "number": rng.randint(low, high)}

    def start(self, task: Mapping[str, Any]) -> list[Message]:
        low, high = task["low"], task["high"]
        question = f"I think of a whole number from {low} to {high}. Guess it."
        return [user(f"{question} Answer with one number only.")]

    def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> list[Message] | None:
        guess = _guess(task, messages)
        if guess == task["number"]:
            return None
        if guess is None:
            return [user(f"Answer with one number from {task['low']} to {task['high']}.")]
        return [user("Higher." if guess < task["number"] else "Lower.")]

    def reward(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> dict[str, float]:
        turns = sum(message["role"] == "assistant" for message in messages)
        guess = _guess(task, messages)
        found = guess == task["number"]
        if found:
            late = max(0, turns - self.par)
            reward = 1 - 0.5 * late / max(1, self.max_turns - self.par)
        elif guess is not None:
            reward = 0.3 * (1 - abs(guess - task["number"]) / self.range_size)
        else:
            reward = 0.0
        return {"reward": reward, "found": float(found), "turns": float(turns)}


def _guess(task: Mapping[str, Any], messages: list[Message]) -> int | None:
    """The guess of the last turn, or None if it is no number of the range."""
    guess = last_number(answer_of(messages))
    return guess if guess is not None and task["low"] <= guess <= task["high"] else None
