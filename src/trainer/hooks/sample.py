"""Greedy answers to fixed prompts before and after training: what the run taught the model, for the eye."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.engine import Engine
from trainer.hooks.base import BaseHook
from trainer.state import TrainState


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text, and rendered up to the point where the assistant speaks."""

    text: str
    token_ids: Sequence[int]


class SampleHook(BaseHook):
    """Shows the answers through `show(title, rows)`, where a row has `prompt`, `before` and (at the end)
    `after`.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        *,
        decode: Callable[[Sequence[int]], str],
        stop_ids: frozenset[int],
        max_new_tokens: int,
        show: Callable[[str, Sequence[Mapping[str, str]]], None],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._decode = decode
        self._stop_ids = stop_ids
        self._max_new_tokens = max_new_tokens
        self._show = show
        self._before: list[str] = []

    def before_training(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        self._before = self._answers()
        rows = [
            {"prompt": prompt.text, "answer": answer}
            for prompt, answer in zip(self._prompts, self._before, strict=True)
        ]
        self._show(f"Samples before training (step {state.step})", rows)
        return {}

    def finish(self, state: TrainState) -> Mapping[str, float]:
        """See `Hook`."""
        # A run that was complete already when it was resumed has nothing to compare with.
        before = self._before or [""] * len(self._prompts)
        rows = [
            {"prompt": prompt.text, "before": old, "after": new}
            for prompt, old, new in zip(self._prompts, before, self._answers(), strict=True)
        ]
        self._show(f"Samples after training (step {state.step})", rows)
        return {}

    def _answers(self) -> list[str]:
        answers = self._engine.continue_greedily(
            [prompt.token_ids for prompt in self._prompts], self._max_new_tokens, self._stop_ids
        )
        return [self._decode(answer).strip() for answer in answers]
