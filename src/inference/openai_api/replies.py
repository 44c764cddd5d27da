"""Answers in OpenAI's form, whole and in events.

Log-probabilities are those with which the tokens were drawn: after temperature, top-k and top-p.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inference.openai_api.bodies import Body, ChatBody, CompletionBody
from inference.openai_api.choices import Choice, Part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Reply(ABC):
    """The answer to one request; a subclass for each of the two forms."""

    kind: str
    kind_of_event: str

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str, body: Body) -> None:
        self.id = f"{self.kind.replace('.', '')}-{uuid.uuid4().hex}"
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._model = model
        self._body = body

    @abstractmethod
    def _choice(self, part: Part, *, is_event: bool) -> dict[str, Any]:
        """`part` as an entry of `choices`."""

    @abstractmethod
    def _has_logprobs(self) -> bool:
        """Whether log-probabilities were asked for."""

    def begin(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Events before the first token."""
        return []

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer once all choices are finished."""
        entries = [self._entry(choice.whole(), choice, is_event=False) for choice in choices]
        return {**self._head(self.kind), "choices": entries, "usage": usage_of(choices, self._body.n)}

    def event(self, part: Part, choice: Choice) -> dict[str, Any] | None:
        """One event; None if the part has nothing that was asked for."""
        wants_tokens = self._body.return_token_ids or self._has_logprobs()
        if not part.text and part.finish_reason is None and not (wants_tokens and part.tokens):
            return None
        return self._event([self._entry(part, choice, is_event=True)])

    def end(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Events after the last token."""
        if not self._body.includes_usage:
            return []
        return [{**self._event([]), "usage": usage_of(choices, self._body.n)}]

    def _event(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(self.kind_of_event), "choices": entries}

    def _entry(self, part: Part, choice: Choice, *, is_event: bool) -> dict[str, Any]:
        entry = self._choice(part, is_event=is_event)
        if self._body.return_token_ids:
            entry["token_ids"] = list(part.tokens)
            if not is_event:
                entry["prompt_token_ids"] = choice.request.prompt
        return entry

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _token_text(self, token: int) -> str:
        text: Any = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text


class CompletionReply(Reply):
    """`/v1/completions`."""

    kind = kind_of_event = "text_completion"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str, body: CompletionBody) -> None:
        super().__init__(tokenizer, model, body)
        self._wants_logprobs = body.logprobs is not None

    def _has_logprobs(self) -> bool:
        return self._wants_logprobs

    def _choice(self, part: Part, *, is_event: bool) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs:
            logprobs = {
                "tokens": [self._token_text(token) for token in part.tokens],
                "token_logprobs": list(part.logprobs),
                "top_logprobs": None,
                "text_offset": list(part.offsets),
            }
        return {
            "index": part.index,
            "text": part.text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
        }


class ChatReply(Reply):
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    kind_of_event = "chat.completion.chunk"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str, body: ChatBody) -> None:
        super().__init__(tokenizer, model, body)
        self._wants_logprobs = body.logprobs

    def begin(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        return [
            self._event(
                [
                    {
                        "index": choice.index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ]
            )
            for choice in choices
        ]

    def _has_logprobs(self) -> bool:
        return self._wants_logprobs

    def _choice(self, part: Part, *, is_event: bool) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs:
            pairs = zip(part.tokens, part.logprobs, strict=True)
            logprobs = {
                "content": [self._logprob(token, logprob) for token, logprob in pairs],
                "refusal": None,
            }
        message: dict[str, Any] = {"content": part.text}
        if not is_event:
            message = {"role": "assistant", "content": part.text, "refusal": None}
        return {
            "index": part.index,
            "delta" if is_event else "message": message,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
        }

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        # The bytes of a part of a character cannot be told from its replacement character.
        content = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": content, "top_logprobs": []}


def usage_of(choices: Sequence[Choice], num_per_prompt: int) -> dict[str, int]:
    """Numbers of tokens; a prompt counts once for all its choices."""
    prompt = sum(len(choice.request.prompt) for choice in choices[::num_per_prompt])
    drawn = sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
