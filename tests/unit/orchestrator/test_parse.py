"""Sampled text to messages with tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.tokens import TurnRenderer
from tests.unit.orchestrator.chats import CHATML, TOOLS, byte_tokenizer, encode

# What the family's renderer writes: reasoning in the last turn only, an empty block if it has none.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content.split('</think>')[-1] %}"
    "{% if m.role != 'assistant' or not loop.last %}{{ text }}"
    "{% else %}{{ '<think>\n' + m.reasoning_content | default('') + '\n</think>\n\n' + text }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>'


def parse(text: str, *, template: str = TOOLS, tools: Any = ADD, **options: Any) -> dict[str, Any]:
    tokenizer = byte_tokenizer(template)
    return TurnRenderer(tokenizer).parse(encode(tokenizer, text), tools, **options)


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call{number:05d}", "function": function}


def test_a_turn_is_its_text_without_the_token_that_ended_it() -> None:
    assert parse(" a b\n<|im_end|>") == {"role": "assistant", "content": " a b\n"}
    assert parse("cut") == {"role": "assistant", "content": "cut"}


def test_calls_are_read_in_order_and_numbered_over_the_episode() -> None:
    second = '<tool_call>{"name": "sub", "arguments": "{\\"c\\": 3}"}</tool_call>'
    message = parse(f"First. {CALL}\n{second}<|im_end|>", num_calls=2)
    assert message["tool_calls"] == [call(2, "add", {"a": 1, "b": [2, "é"]}), call(3, "sub", {"c": 3})]
    assert message["content"] == "First."


def test_a_template_that_writes_no_calls_keeps_them_in_the_text() -> None:
    message = parse(f"First. {CALL}<|im_end|>", template=CHATML)
    assert message["content"] == f"First. {CALL}"
    assert message["tool_calls"] == [call(0, "add", {"a": 1, "b": [2, "é"]})]


def test_where_no_tools_are_offered_nothing_is_a_call() -> None:
    assert parse(f"{CALL}<|im_end|>", tools=()) == {"role": "assistant", "content": CALL}


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[1]",
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": "1"}',
        '{"name": "add", "arguments": {"a": NaN}}',
        "[" * 100_000,
        '{"name": "add", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}",
    ],
)
def test_a_malformed_call_stays_text_beside_those_that_are_not(body: str) -> None:
    malformed = f"<tool_call>{body}</tool_call>"
    assert parse(f"x{malformed}<|im_end|>") == {"role": "assistant", "content": f"x{malformed}"}
    message = parse(f"{malformed}{CALL}<|im_end|>")
    assert message["content"] == malformed
    assert message["tool_calls"] == [call(0, "add", {"a": 1, "b": [2, "é"]})]


def parse_as_family(text: str, template: str) -> dict[str, Any]:
    tokenizer = byte_tokenizer(template)
    words = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_tokens(words)
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    renderer = TurnRenderer(tokenizer)
    prompt = renderer.prompt([{"role": "user", "content": "q"}], ())
    return renderer.parse(encode(tokenizer, text), ADD, prompt=prompt, num_calls=1)


def test_a_family_renderer_that_writes_as_the_template_does_tells_reasoning_from_the_answer() -> None:
    message = parse_as_family(f"<think>\nhm\n</think>\n\nI add.\n{CALL}<|im_end|>", QWEN)
    assert message["reasoning_content"].strip() == "hm" and message["content"].strip() == "I add."
    assert message["tool_calls"] == [call(1, "add", {"a": 1, "b": [2, "é"]})]


def test_a_family_renderer_that_writes_another_text_than_the_template_is_not_asked() -> None:
    assert parse_as_family("<think>hm</think>a<|im_end|>", CHATML)["content"] == "<think>hm</think>a"


@pytest.mark.parametrize(
    "body",
    [
        "{]",
        # A lenient reader of JSON takes these; neither the way to the environment nor a trace can hold them.
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '{"name": "add\\udfff", "arguments": {}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
    ],
)
def test_a_malformed_call_is_left_as_text_for_a_family_too(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert parse_as_family(f"{text}<|im_end|>", QWEN) == {"role": "assistant", "content": text}
