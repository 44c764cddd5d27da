"""One request while it is drawn: what it asked for, what it has, and when it ends."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Items
from typing import Any

from contract.policy import FinishReason, GenerateRequest, check_sampling
from inference.engine.base import Drawn
from inference.engine.sampler import stream_of


def check_request(request: GenerateRequest, *, vocab_size: int, max_len: int) -> None:
    """Raises:
    ValueError: the prompt or the sampling cannot be drawn.
    """
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise ValueError("the prompt is empty; it needs at least one token")
    unknown = [token for token in prompt if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(
            f"token {unknown[0]} of the prompt is unknown: the model has tokens 0 to {vocab_size - 1}"
        )
    if len(prompt) >= max_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, and sequences may have {max_len} with at least one drawn "
            f"token; shorten it, or raise max_len of the policy server"
        )
    check_sampling(sampling)
    if any(not 0 <= token < vocab_size for token in sampling.stop_ids):
        raise ValueError(f"stop_ids = {sampling.stop_ids}: the model has tokens 0 to {vocab_size - 1}")
    if sampling.min_tokens and len(set(sampling.stop_ids)) == vocab_size:
        raise ValueError("min_tokens leaves nothing to draw where every token is in stop_ids; remove some")


class StopTexts:
    """Looks for texts in what a sequence of tokens decodes to, token by token.

    A text is found with the token that completes it, also if it began tokens before. Bytes of a character
    that is not complete yet are waited for.
    """

    def __init__(self, tokenizer: Any, texts: Items[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        self._longest = max(len(text) for text in texts)
        self._tokens: list[int] = []
        # Tokens before `_read` are decoded for good; those from `_prefix` on are decoded with every new
        # token, as many tokenizers give a token another text at the start than after others.
        self._prefix = 0
        self._read = 0
        self._tail = ""
        self._tail_start = 0
        self._num_searched = 0

    def push(self, token: int) -> bool:
        """Take one more token; whether it completes a text."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        after = self._decode(self._tokens[self._prefix :])
        new = after[len(before) :]
        complete = new.rstrip("\ufffd")
        text = self._tail + complete
        is_found = self._is_in(text)
        self._num_searched = max(self._num_searched, self._tail_start + len(text))
        if new and new == complete:
            self._prefix, self._read = self._read, len(self._tokens)
            keep = max(len(text) - self._longest + 1, 0)
            self._tail, self._tail_start = text[keep:], self._tail_start + keep
        return is_found

    def _is_in(self, text: str) -> bool:
        for wanted in self._texts:
            # Only what ends in new text: the tail may hold a whole shorter text that was seen already.
            start = max(self._num_searched - self._tail_start - len(wanted) + 1, 0)
            if text.find(wanted, start) >= 0:
                return True
        return False

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Sequence:
    """One request in the engine. Owned by the engine's thread, but for `cancel`.

    Attributes:
        request: what was asked.
        stream: where its random numbers begin.
        slot: where it is computed; None while it waits.
        num_drawn: tokens drawn.
        finish_reason: None while more will come.
        error: why it ends without a finish reason.
        is_cancelled: whoever asked has left.
    """

    def __init__(self, request: GenerateRequest, tokenizer: Any) -> None:
        sampling = request.sampling
        self.request = request
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(64)
        self.stream = stream_of(seed)
        self.key = tuple(request.prompt)
        self.slot: int | None = None
        self.num_drawn = 0
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.is_cancelled = False
        self._stop_ids = frozenset(sampling.stop_ids)
        self._stop_texts = StopTexts(tokenizer, sampling.stop) if sampling.stop else None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and drawn tokens."""
        return len(self.request.prompt) + self.num_drawn

    @property
    def may_not_stop(self) -> bool:
        """Whether the next token is among the first `min_tokens`, none of which may end the sequence."""
        return self.num_drawn < self.request.sampling.min_tokens

    def push(self, token: int, logprob: float, version: int, max_len: int) -> None:
        """Take a drawn token; sets `finish_reason` if it is the last."""
        sampling = self.request.sampling
        may_stop = not self.may_not_stop
        self.num_drawn += 1
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)
        is_text = self._stop_texts is not None and self._stop_texts.push(token)
        if may_stop and (is_text or token in self._stop_ids):
            self.finish_reason = "stop"
        elif self.num_drawn >= sampling.max_tokens or self.num_tokens >= max_len:
            self.finish_reason = "length"

    def take(self) -> Drawn:
        """What was drawn since the last call."""
        drawn = Drawn(tuple(self._tokens), tuple(self._logprobs), tuple(self._versions), self.finish_reason)
        self._tokens, self._logprobs, self._versions = [], [], []
        return drawn
