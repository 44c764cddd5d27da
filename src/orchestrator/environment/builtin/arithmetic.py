"""`arithmetic`: compute with whole numbers; the answer is exact."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from orchestrator.environment.base import Message
from orchestrator.environment.builtin.expression import evaluate
from orchestrator.environment.builtin.generated import (
    Generated,
    answer_of,
    distinct,
    last_number,
    user,
    whole,
)

FORMAT_CREDIT = 0.1
"""For an answer that is a whole number and nothing else, right or wrong."""


class Expressions(Generated):
    """Tasks `{expression, answer}`: an expression to compute, and its value. The arguments are those of
    `Arithmetic`.
    """

    def __init__(
        self, split: str, operators: str, digits: int, num_terms: int, num_tasks: int, seed: int
    ) -> None:
        super().__init__(split, num_tasks, seed)
        self.operators = distinct("operators", operators, 1, allowed="+-*")
        self.digits = whole("digits", digits, 1, 6)
        self.num_terms = whole("num_terms", num_terms, 2, 5)

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """A task `{expression, answer}`; numbers of few digits are as likely as those of many."""
        terms = [str(rng.randint(0, 10 ** rng.randint(1, self.digits) - 1)) for _ in range(self.num_terms)]
        expression = terms[0] + "".join(f" {rng.choice(self.operators)} {term}" for term in terms[1:])
        return {"expression": expression, "answer": evaluate(expression)}


class Arithmetic(Expressions):
    """A task: "Compute 37 + 5. Answer with the number only.", and the answer is "42".

    The reward is 0.9 if the last whole number in the answer is the right one (`correct`), and 0.1 if the
    answer is nothing but a whole number (`format`): 1 for a right answer as it was asked for.

    Args:
        split: `train`, or `test` for held-out tasks.
        operators: those that are used, of `+`, `-` and `*`.
        digits: most digits of a number.
        num_terms: how many numbers are combined.
        num_tasks: number of tasks.
        seed: another seed gives other tasks.
    """

    def __init__(
        self,
        split: str = "train",
        operators: str = "+-",
        digits: int = 2,
        num_terms: int = 2,
        num_tasks: int = 100_000,
        seed: int = 0,
    ) -> None:
        super().__init__(split, operators, digits, num_terms, num_tasks, seed)
        self.task(0)

    def start(self, task: Mapping[str, Any]) -> list[Message]:
        return [user(f"Compute {task['expression']}. Answer with the number only.")]

    def reward(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> dict[str, float]:
        answer = answer_of(messages)
        correct = float(last_number(answer) == int(task["answer"]))
        form = float(re.fullmatch(r"-?[0-9]+", answer) is not None)
        return {
            "reward": (1 - FORMAT_CREDIT) * correct + FORMAT_CREDIT * form,
            "correct": correct,
            "format": form,
        }
