"""`sort-letters`: put letters into alphabetical order."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from orchestrator.environment.base import Message
from orchestrator.environment.builtin.generated import Generated, answer_of, distinct, similarity, span, user


class SortLetters(Generated):
    """A task: "Sort these letters alphabetically: d a c", and the answer is "a c d".

    The reward is 1 for the exact answer, and otherwise the share of letters that it has in common, in order,
    with the right one, which is below 1. Space between letters does not count. `exact` is logged beside it.

    Args:
        split: `train`, or `test` for held-out tasks.
        min_length: fewest letters of a task.
        max_length: most of them.
        alphabet: the letters that are used, in their order.
        separator: stands between letters in the question. With a space most tokenizers see each letter.
        num_tasks: number of tasks.
        seed: another seed gives other tasks.
    """

    def __init__(
        self,
        split: str = "train",
        min_length: int = 3,
        max_length: int = 5,
        alphabet: str = "abcdefghijklmnopqrstuvwxyz",
        separator: str = " ",
        num_tasks: int = 100_000,
        seed: int = 0,
    ) -> None:
        super().__init__(split, num_tasks, seed)
        self.lengths = span("min_length", min_length, "max_length", max_length, 1, 64)
        self.alphabet = distinct("alphabet", alphabet, 2)
        self.separator = separator
        self.task(0)

    def draw(self, rng: random.Random) -> dict[str, Any]:
        return {"letters": "".join(rng.choices(self.alphabet, k=rng.randint(*self.lengths)))}

    def start(self, task: Mapping[str, Any]) -> list[Message]:
        return [user(f"Sort these letters alphabetically: {self.separator.join(task['letters'])}")]

    def reward(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> dict[str, float]:
        given = "".join(answer_of(messages).split())
        expected = "".join(sorted(task["letters"], key=self.alphabet.index))
        return {"reward": similarity(given, expected), "exact": float(given == expected)}
