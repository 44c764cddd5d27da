"""What the policy server asks of an engine.

An engine draws tokens for many requests at a time, each on its own: what a request draws depends on its
prompt, its sampling and the weights, never on what else is running.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from contract.policy import FinishReason, GenerateRequest, PauseMode

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]
"""Weights under their Hugging Face names."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that one request has drawn since the last `Drawn`.

    Attributes:
        tokens, logprobs, versions: see `contract.policy.GenerateResponse`; of equal length.
        finish_reason: None while more will come.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and what is going on.

    Attributes:
        num_prefills: prompts that were computed; those that share a prompt with another of their group are
            not.
    """

    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_drawn_tokens: int
    num_prefills: int
    num_updates: int


class Engine(Protocol):
    """Draws tokens. All methods are called on one event loop, but the engine computes elsewhere.

    `draw` is an async generator: closing it ends the request.
    """

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's, with its chat template."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine for good; None while it works. The server looks at it several times
        a second, and ends the process."""
        ...

    @property
    def version(self) -> int:
        """Number of the weights, which never falls; `inference.lineage` knows the policy version that it
        stands for. The model as loaded is 0, or -1 in a server that belongs to a run, whose trainer gives it
        weights before anybody of the run draws.
        """
        ...

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt included, in tokens."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether a pause is in force."""
        ...

    def draw(self, request: GenerateRequest) -> AsyncGenerator[Drawn, None]:
        """Draw one sequence, piece by piece. Leaving the iterator early ends the request.

        Raises:
            ValueError: the prompt is empty, has unknown tokens, or leaves no room for a token in `max_len`.
            PolicyServerError: the engine has failed.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Admit nothing and draw nothing until `resume`; returns when nothing is being drawn."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def load(self, tensors: NamedTensors, version: int, mode: PauseMode) -> None:
        """Replace the weights in place: everything is read and checked while drawing goes on, then drawing
        pauses, the weights are swapped, what was computed with the old ones for later requests (shared
        prefixes) is forgotten, the version changes, and drawing goes on, unless it was paused before.

        Raises:
            PublishError: `tensors` cannot be read, or they are not the weights of this model; the old ones
                stay.
        """
        ...

    def stats(self) -> EngineStats:
        """For metrics."""
        ...

    async def close(self) -> None:
        """End running requests (`abort`) and free what the engine holds."""
        ...
