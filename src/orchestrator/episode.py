"""One episode: turns of the policy and of the environment, as one growing list of tokens.

Owns the order of calls and the record of every token: whether the policy sampled it, and if so with which
log-probability and by which version. Everything else (prompts, template tokens, tool results) is marked as
not sampled, and is never trained. Messages become tokens in `tokens`; calls of the environment have their
time limits in `environment`, draws in `client`.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import xxhash

from contract.policy import GenerateResponse, Sampling
from contract.sections import SamplingConfig
from orchestrator.environment.base import Message
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.tokens import TurnRenderer

_MOST_DRAWS = 8
"""Of one turn, which a weight update ends where the policy server's `pause_mode` is `abort`."""

EpisodeEnd = Literal["stop", "length", "context", "turns"]
"""Why an episode ended: the policy's last turn ended and the environment added nothing; a turn was cut at its
most tokens; the next turn had no room in `seq_len`; the environment's most turns were reached."""


@dataclass(slots=True)
class SampledTokens:
    """One list of tokens as the policy saw and sampled it; the four lists have one entry per token.

    Attributes:
        logprobs: natural logarithm of the probability that the token was sampled with; 0.0 where it was not.
        versions: policy version that sampled the token; -1 where none did.
    """

    tokens: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def append_given(self, tokens: Sequence[int]) -> None:
        """Tokens that the policy did not sample."""
        self.tokens += tokens
        self.is_sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def append_sampled(self, response: GenerateResponse) -> None:
        """A turn of the policy."""
        self.tokens += response.tokens
        self.is_sampled += [True] * len(response.tokens)
        self.logprobs += response.logprobs
        self.versions += response.versions


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode.

    Attributes:
        samples: more than one where the chat template rewrote history between turns.
        messages: the whole conversation; the last is the policy's.
        rewards: by name; `reward` is the one that counts.
    """

    samples: list[SampledTokens]
    messages: list[Message]
    rewards: dict[str, float]
    num_turns: int
    finish_reason: EpisodeEnd

    @property
    def reward(self) -> float:
        return self.rewards["reward"]

    @property
    def is_truncated(self) -> bool:
        """Tokens ran out before the episode was over."""
        return self.finish_reason in ("length", "context")

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(sum(sample.is_sampled) for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def oldest_version(self) -> int:
        """Of the policies that sampled a token."""
        # As sets: several times faster than a look at each token, of which there may be millions in a batch.
        return min(set().union(*(sample.versions for sample in self.samples)) - {-1})

    @property
    def newest_version(self) -> int:
        """Of the policies that sampled a token."""
        return max(max(sample.versions) for sample in self.samples)


class EpisodeSource(Protocol):
    """The environment of an episode; every call may raise `EpisodeFailed`."""

    @property
    def max_turns(self) -> int: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    async def start(self, task: Mapping[str, Any]) -> list[Message]: ...

    async def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> tuple[list[Message] | None, dict[str, Any]]: ...

    async def reward(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> dict[str, float]: ...


class Policy(Protocol):
    """What draws a turn; `client.PolicyClient` is one."""

    async def generate(self, prompt: list[int], sampling: Sampling, request_id: str) -> GenerateResponse: ...


class EpisodeRunner:
    """Runs episodes, any number at a time; holds nothing of them."""

    def __init__(self, client: Policy, renderer: TurnRenderer, seq_len: int) -> None:
        """
        Args:
            seq_len: most tokens of a sample, prompt included.
        """
        self._client = client
        self._renderer = renderer
        self._seq_len = seq_len
        # Several orchestrators may have used one server: a number alone could be that of a running request.
        self._name = secrets.token_hex(4)
        self._numbers = itertools.count()

    async def run(
        self, source: EpisodeSource, task: Mapping[str, Any], *, sampling: SamplingConfig, seed: int
    ) -> Episode:
        """One episode of `task`. Cancelling it ends the running draw.

        Args:
            seed: decides, with the number of the turn, what each turn draws.

        Raises:
            EpisodeFailed: there is no reward; see its kinds.
            PolicyServerError: no episode could go on.
        """
        messages = list(await source.start(task))
        samples = [self._begin(messages, source.tools)]
        state: dict[str, Any] = {}
        num_turns = 0
        end: EpisodeEnd | None = None
        while end is None:
            response = await self._take_turn(samples[-1], messages, source.tools, sampling, seed, num_turns)
            num_turns += 1
            if response.finish_reason == "length":
                end = "length"
            elif num_turns >= source.max_turns:
                end = "stop" if source.max_turns == 1 else "turns"
            else:
                new_messages, state = await source.respond(task, messages, state)
                if new_messages is None:
                    end = "stop"
                elif not self._continue(samples, len(response.tokens), messages, new_messages, source.tools):
                    # The turns so far stand, and so does their reward; nobody answers the new messages.
                    end = "context"
                else:
                    messages += new_messages
        rewards = await source.reward(task, messages, state)
        return Episode(samples, messages, rewards, num_turns, end)

    def _begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> SampledTokens:
        sample, length = SampledTokens(), "more"
        if self._renderer.can_fit(messages, self._seq_len):
            sample.append_given(self._renderer.prompt(messages, tools))
            length = f"{len(sample.tokens)}"
            if len(sample.tokens) < self._seq_len:
                return sample
        raise EpisodeFailed(
            "prompt too long",
            f"the first prompt has {length} tokens, which leaves nothing to sample within seq_len = "
            f"{self._seq_len}; raise seq_len, or give shorter tasks",
        )

    async def _take_turn(
        self,
        sample: SampledTokens,
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingConfig,
        seed: int,
        turn: int,
    ) -> GenerateResponse:
        """Draws the next turn, and appends it to the tokens and to the messages."""
        prompt = list(sample.tokens)
        response = await self._draw(prompt, sampling, seed, turn)
        sample.append_sampled(response)
        num_calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        messages.append(self._renderer.parse(response.tokens, tools, prompt=prompt, num_calls=num_calls))
        return response

    def _continue(
        self,
        samples: list[SampledTokens],
        num_sampled: int,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> bool:
        """Appends the new messages to the last sample, or begins another where it cannot grow into them.

        Returns:
            False, with nothing changed, if that leaves no room for a turn.
        """
        sample = samples[-1]
        if not self._renderer.can_fit(new_messages, self._seq_len):
            return False
        appended = self._renderer.extend(sample.tokens, num_sampled, messages, new_messages, tools)
        if appended is None:
            sample = SampledTokens()
            appended = self._renderer.prompt([*messages, *new_messages], tools)
        if len(sample.tokens) + len(appended) >= self._seq_len:
            return False
        sample.append_given(appended)
        if sample is not samples[-1]:
            samples.append(sample)
        return True

    async def _draw(
        self, prompt: list[int], config: SamplingConfig, seed: int, turn: int
    ) -> GenerateResponse:
        max_tokens = min(config.max_tokens, self._seq_len - len(prompt))
        sampling = Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=max_tokens,
            min_tokens=min(config.min_tokens, max_tokens),
            stop_ids=self._renderer.stop_ids,
            stop=config.stop,
            seed=_seed_of_turn(seed, turn),
        )
        response = await self._generate(prompt, sampling)
        num_draws = 1
        while response.finish_reason == "abort" and num_draws < _MOST_DRAWS:
            # Anew with the same seed: with another one, long turns, which are the ones that an update meets,
            # would give way to short ones.
            response = await self._generate(prompt, sampling)
            num_draws += 1
        _check_response(response, max_tokens)
        return response

    async def _generate(self, prompt: list[int], sampling: Sampling) -> GenerateResponse:
        return await self._client.generate(prompt, sampling, f"{self._name}-{next(self._numbers)}")


def _seed_of_turn(seed: int, turn: int) -> int:
    """63 bits, so that it is a signed number of 64 for everyone."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{turn}".encode()) >> 1


def _check_response(response: GenerateResponse, max_tokens: int) -> None:
    """Raises `EpisodeFailed` unless every token has its log-probability and version: nothing is filled in."""
    num_tokens = len(response.tokens)
    fault = None
    if response.finish_reason == "abort":
        fault = f"it ended the draw after {num_tokens} tokens (abort), {_MOST_DRAWS} times over"
    elif num_tokens == 0:
        fault = "it returned no token ids"
    elif len(response.logprobs) != num_tokens or len(response.versions) != num_tokens:
        fault = (
            f"it returned {num_tokens} token ids, {len(response.logprobs)} log-probabilities and "
            f"{len(response.versions)} versions, which must be as many"
        )
    elif num_tokens > max_tokens:
        fault = f"it returned {num_tokens} tokens of at most {max_tokens}"
    elif min(response.tokens) < 0 or min(response.versions) < 0:
        fault = "a token id or a version is negative"
    elif not all(map(math.isfinite, response.logprobs)):
        fault = "a log-probability is not finite"
    if fault is not None:
        raise EpisodeFailed("server", f"the policy server's answer cannot be used: {fault}")
