"""Bodies of OpenAI requests: what is understood, what makes no difference, and what is refused.

A field that would change the answer and that this server does not know is refused, never ignored. `null`
counts as not given, as with OpenAI.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from contract.policy import Sampling
from inference.refusal import refuse_openai

T = TypeVar("T", bound="Body")

_INERT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""They label a request and change nothing."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "ignore_eos": (False,),
}
"""Known fields that are not supported, with the values that ask for nothing."""

_MAX_CHOICES = 128


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: a last event tells the numbers of tokens."""

    include_usage: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both completion routes take.

    Attributes:
        model: the served name.
        n: choices of each prompt.
        top_k, min_tokens, stop_token_ids: see `contract.policy.Sampling`; not of OpenAI.
        seed: the first choice draws with it, the others with seeds made from it.
        return_token_ids: give the token ids of prompt and choices too; not of OpenAI.
    """

    model: str
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @property
    def stop_texts(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """
        Raises:
            Refused: fields contradict each other or are out of range.
        """
        if not 1 <= self.n <= _MAX_CHOICES:
            raise refuse_openai(f"n = {self.n} is not between 1 and {_MAX_CHOICES}", "n")
        if self.stream_options is not None and not self.stream:
            raise refuse_openai("stream_options needs stream = true", "stream_options")

    def sampling(self, max_tokens: int, end_ids: frozenset[int], choice: int) -> Sampling:
        """How choice number `choice` of a prompt is drawn."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_ids=sorted(end_ids.union(self.stop_token_ids)),
            stop=self.stop_texts,
            seed=None if self.seed is None else _seed_of(self.seed, choice),
        )


class CompletionBody(Body, frozen=True, kw_only=True):
    """`POST /v1/completions`.

    Attributes:
        prompt: one text, several, the token ids of one prompt, or those of several.
        logprobs: 0 gives the log-probability of each drawn token.
    """

    prompt: str | list[Any]
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.logprobs:
            raise refuse_openai(
                f"logprobs = {self.logprobs} asks for alternatives to the drawn tokens, which this server "
                f"cannot give; 0 gives the log-probabilities of the drawn ones",
                "logprobs",
            )


class ChatBody(Body, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`.

    Attributes:
        tools: given to the chat template; the answer is text as drawn, calls in it are not parsed.
        logprobs: give the log-probability of each drawn token.
        chat_template_kwargs: more arguments of the chat template, e.g. `enable_thinking`; not of OpenAI.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        """Most tokens of a choice, by either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs:
            raise refuse_openai(
                f"top_logprobs = {self.top_logprobs} asks for alternatives to the drawn tokens, which this "
                f"server cannot give; logprobs = true gives the log-probabilities of the drawn ones",
                "top_logprobs",
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise refuse_openai(
                f"max_tokens = {self.max_tokens} and max_completion_tokens = {self.max_completion_tokens} "
                f"contradict each other; give one",
                "max_completion_tokens",
            )


def parse(content: bytes, kind: type[T]) -> T:
    """
    Raises:
        Refused: the body is no JSON object, lacks a field, has one of a wrong type, or asks for something
            that this server cannot do.
    """
    try:
        given = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refuse_openai(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise refuse_openai("the body must be a JSON object")
    values = {name: value for name, value in given.items() if value is not None}
    known = set(kind.__struct_fields__)
    for name, value in values.items():
        if name not in known and name not in _INERT:
            _check_neutral(name, value)
    try:
        body = msgspec.convert({name: values[name] for name in known & values.keys()}, kind)
    except msgspec.ValidationError as error:
        raise refuse_openai(f"the body is not valid: {error}", _field_of(error)) from error
    body.check()
    return body


def _check_neutral(name: str, value: Any) -> None:
    if name not in _NEUTRAL:
        raise refuse_openai(f"{name!r} is not known to this server, and is not ignored; leave it out", name)
    # Python takes true for 1.
    if not any(
        isinstance(value, bool) == isinstance(item, bool) and value == item for item in _NEUTRAL[name]
    ):
        valid = ", ".join(msgspec.json.encode(neutral).decode() for neutral in _NEUTRAL[name])
        found = msgspec.json.encode(value).decode()
        raise refuse_openai(
            f"{name} = {found} is not supported by this server; leave it out (or send {valid})", name
        )


def _field_of(error: msgspec.ValidationError) -> str | None:
    """The top-level field that a message speaks of: "... - at `$.n`", "... required field `model`"."""
    words = [word for word in str(error).split("`") if word]
    last = words[-1] if len(words) > 1 else ""
    name = last.removeprefix("$").removeprefix(".").split(".")[0].split("[")[0]
    if "required field" in str(error):
        name = words[1]
    return name or None


def _seed_of(seed: int, choice: int) -> int:
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
