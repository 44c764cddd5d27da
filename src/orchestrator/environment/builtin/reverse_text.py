"""`reverse-text`: write a word, or a list of words, backwards."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from orchestrator.environment.base import Message
from orchestrator.environment.builtin.generated import (
    Generated,
    answer_of,
    distinct,
    one_of,
    similarity,
    span,
    user,
)

# Common, short, and one token each in most vocabularies.
_WORD_LIST = """
apple arm baby ball bank bear bed bell bird boat book box boy bread bus cake car cat chair city clock
cloud coat cow cup dog door duck ear egg eye farm fire fish flag foot fox game girl gold hand hat head
hill home horse house ice iron key king lake lamp leaf leg lion map milk moon mouse nose oil park pen pig
plate queen rain ring river road rock roof room rose salt sand sea ship shoe sky snow song star sun table
tail tea tent train tree wall water wind window wood
"""
_WORDS = _WORD_LIST.split()


class ReverseText(Generated):
    """A task with `unit = "words"`: "Write these words in reverse order: cat moon tree", and the answer is
    "tree moon cat". With "letters": "Write this backwards: tram", and "mart".

    The reward is 1 for the exact answer, and otherwise the share of words or letters that it has in common,
    in order, with the right one (`similarity`), which is below 1. `exact` is logged beside it.

    Args:
        split: `train`, or `test` for held-out tasks.
        unit: what changes places, `words` or `letters`.
        min_length: fewest words or letters of a task.
        max_length: most of them.
        alphabet: the letters that `letters` uses.
        num_tasks: number of tasks.
        seed: another seed gives other tasks.
    """

    def __init__(
        self,
        split: str = "train",
        unit: str = "words",
        min_length: int = 2,
        max_length: int = 4,
        alphabet: str = "abcdefghijklmnopqrstuvwxyz",
        num_tasks: int = 100_000,
        seed: int = 0,
    ) -> None:
        super().__init__(split, num_tasks, seed)
        self.unit = one_of("unit", unit, ("words", "letters"))
        self.lengths = span("min_length", min_length, "max_length", max_length, 1, 64)
        self.alphabet = distinct("alphabet", alphabet, 2)
        self.task(0)

    def draw(self, rng: random.Random) -> dict[str, Any]:
        length = rng.randint(*self.lengths)
        if self.unit == "words":
            return {"text": " ".join(rng.choices(_WORDS, k=length))}
        return {"text": "".join(rng.choices(self.alphabet, k=length))}

    def start(self, task: Mapping[str, Any]) -> list[Message]:
        if self.unit == "words":
            return [user(f"Write these words in reverse order: {task['text']}")]
        return [user(f"Write this backwards: {task['text']}")]

    def reward(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> dict[str, float]:
        answer, text = answer_of(messages), task["text"]
        if self.unit == "words":
            given, expected = answer.split(), text.split()[::-1]
        else:
            given, expected = answer, text[::-1]
        return {"reward": similarity(given, expected), "exact": float(given == expected)}
