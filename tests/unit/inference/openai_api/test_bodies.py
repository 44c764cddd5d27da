"""What OpenAI requests may ask for: what is unknown or unsupported is refused by name, never ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference.openai_api.bodies import Body, ChatBody, CompletionBody, parse
from inference.openai_api.prompts import tokens_of_chat, tokens_of_prompts
from inference.refusal import Refused

CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
COMPLETION = {"model": "m", "prompt": "a"}


def _parse(kind: type[Body], **fields: Any) -> Body:
    base = CHAT if kind is ChatBody else COMPLETION
    return parse(json.dumps({**base, **fields}).encode(), kind)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ChatBody, "frequency_penalty", 0.5),
        (ChatBody, "presence_penalty", -1),
        (ChatBody, "logit_bias", {"5": 1}),
        (ChatBody, "response_format", {"type": "json_object"}),
        (ChatBody, "tool_choice", "required"),
        (ChatBody, "reasoning_effort", "low"),
        (ChatBody, "top_logprobs", 2),
        (ChatBody, "store", True),
        (ChatBody, "typo", 1),
        (ChatBody, "prompt", "a"),
        (CompletionBody, "logprobs", 3),
        (CompletionBody, "echo", True),
        (CompletionBody, "echo", 1),
        (CompletionBody, "best_of", 2),
        (CompletionBody, "best_of", True),
        (CompletionBody, "suffix", "z"),
        (CompletionBody, "repetition_penalty", 1.1),
        (CompletionBody, "n", 0),
        (CompletionBody, "n", 1000),
        (CompletionBody, "n", "two"),
        (CompletionBody, "stream_options", {"include_usage": True}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(kind: type[Body], field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field) as caught:
        _parse(kind, **{field: value})
    assert caught.value.status == 400 and caught.value.param == field


def test_values_that_ask_for_nothing_and_labels_are_taken() -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "top_logprobs": 0,
        "seed": None,
        "suffix": None,
        "unheard_of": None,
    }
    assert _parse(ChatBody, **neutral) == _parse(ChatBody)
    assert _parse(CompletionBody, best_of=1, echo=False, suffix="") == _parse(CompletionBody)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(Refused, match="model") as caught:
        parse(b'{"prompt": "a"}', CompletionBody)
    assert caught.value.param == "model"
    with pytest.raises(Refused, match="JSON object"):
        parse(b"[]", CompletionBody)
    with pytest.raises(Refused, match="not JSON"):
        parse(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, CompletionBody)


def test_two_limits_that_differ_are_refused() -> None:
    chat = _parse(ChatBody, max_tokens=5, max_completion_tokens=5)
    assert isinstance(chat, ChatBody) and chat.limit == 5
    with pytest.raises(Refused, match="max_tokens = 5 and max_completion_tokens = 6"):
        _parse(ChatBody, max_tokens=5, max_completion_tokens=6)


@pytest.mark.parametrize("prompt", [[], ["", 1], [[]], [[1], []], [True], [["a"]], [1.5]])
def test_prompts_that_are_neither_text_nor_ids_are_refused(tokenizer: Any, prompt: Any) -> None:
    with pytest.raises(Refused, match="prompt must be"):
        tokens_of_prompts(tokenizer, prompt)


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"content": "a"}, "role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "only text"),
        ({"role": "user", "content": 5}, "only text"),
        ({"role": "user", "content": "a", "audio": {"id": "x"}}, "audio"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls"),
    ],
)
def test_messages_that_are_not_text_are_refused(tokenizer: Any, message: Any, word: str) -> None:
    body = ChatBody(model="m", messages=[{"role": "user", "content": "a"}, message])
    with pytest.raises(Refused, match=rf"messages\[1\].*{word}"):
        tokens_of_chat(tokenizer, body)
