"""Prompts, what is appended to a sampled turn, and what ends one."""

from __future__ import annotations

from typing import Any

import pytest

from contract.errors import DataError
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.tokens import TurnRenderer
from tests.unit.orchestrator.chats import CHATML, REASONING, TOOLS, byte_tokenizer, encode, tool, user

ADD = [{"type": "function", "function": {"name": "add"}}]
SUB = [{"type": "function", "function": {"name": "sub"}}]

# Refuses a result that answers no call, and writes an end of sequence behind the policy's turns only.
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULT]{{ m.content }}"
    "[/RESULT]{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)
OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")


def extend(
    tokenizer: Any, sampled: str, new_messages: list[dict[str, Any]], tools: Any = (), **more: Any
) -> list[int] | None:
    """What is appended to the answer `sampled` to a question."""
    renderer = TurnRenderer(tokenizer)
    turn = encode(tokenizer, sampled)
    prompt = renderer.prompt([user("q")], tools)
    messages = [user("q"), renderer.parse(turn, tools) | more]
    return renderer.extend([*prompt, *turn], len(turn), messages, new_messages, tools)


def test_the_prompt_is_the_templates_rendering_with_the_generation_prompt() -> None:
    tokenizer = byte_tokenizer()
    messages = [{"role": "system", "content": "s"}, user("é")]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert TurnRenderer(tokenizer).prompt(messages, ()) == expected


def test_prompts_are_cached_by_messages_and_tools_and_the_cache_is_bounded() -> None:
    tokenizer = byte_tokenizer(TOOLS)
    renderer = TurnRenderer(tokenizer)
    first = renderer.prompt([user("q")], ADD)
    assert renderer.prompt([user("q")], ADD) is first
    other = renderer.prompt([user("q")], SUB)
    assert other != first
    assert tokenizer.decode(other).count("sub") == 1 and "add" not in tokenizer.decode(other)
    for index in range(1000):
        renderer.prompt([user(f"{index}")], ())
    again = renderer.prompt([user("q")], ADD)
    assert again == first and again is not first


@pytest.mark.parametrize(
    ("template", "stop_ids"),
    [
        (CHATML, [2]),
        (CHATML.replace("<|im_end|>", "<|endoftext|>"), [2, 0]),
        (PLAIN, [2]),
        (CHATML.replace("<|im_end|>", " (end)<|endoftext|>"), [2]),
    ],
)
def test_turns_end_at_the_end_of_sequence_and_at_the_templates_own_end_of_a_turn(
    template: str, stop_ids: list[int]
) -> None:
    assert TurnRenderer(byte_tokenizer(template)).stop_ids == stop_ids


def test_white_space_before_the_end_of_a_turn_is_not_repeated_behind_it() -> None:
    tokenizer = byte_tokenizer(CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content }}\n<|im_end|>"))
    assert extend(tokenizer, "a<|im_end|>", [tool("r")]) == encode(
        tokenizer, "\n<|im_start|>tool\nr\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_that_ended_with_another_token_than_the_templates_cannot_be_extended() -> None:
    tokenizer = byte_tokenizer(CHATML.replace("<|im_end|>", "<|endoftext|>"))
    assert extend(tokenizer, "a<|im_end|>", [tool("r")]) is None
    assert extend(tokenizer, "a<|endoftext|>", [tool("r")]) is not None


def test_a_turn_that_no_token_of_the_template_ends_cannot_be_extended() -> None:
    assert extend(byte_tokenizer(PLAIN), "a<|im_end|>", [user("r")]) is None


def test_a_template_that_changes_what_stood_before_the_turn_is_not_extended() -> None:
    assert extend(byte_tokenizer(OPENED), "a</think>b<|im_end|>", [user("r")]) is None


@pytest.mark.parametrize("shown", ["{{ messages | length }}", "{{ messages[-1].content | length }}"])
def test_a_head_that_changes_without_changing_its_length_is_seen(shown: str) -> None:
    assert extend(byte_tokenizer(shown + CHATML), "a<|im_end|>", [user("rr")]) is None
    assert extend(byte_tokenizer("x" + CHATML), "a<|im_end|>", [user("rr")]) is not None


@pytest.mark.parametrize("shown", ["{{ m.content | length }}", " (end)"])
def test_text_between_the_turn_and_its_end_that_was_not_sampled_is_seen(shown: str) -> None:
    before = byte_tokenizer(CHATML.replace("<|im_end|>", f"{shown}<|im_end|>"))
    assert extend(before, "a<|im_end|>", [user("r")]) is None


def test_what_follows_a_turn_and_depends_on_its_text_is_not_taken_from_another_text() -> None:
    behind = byte_tokenizer(CHATML.replace("<|im_end|>", "<|im_end|>{{ m.content | length }}"))
    assert extend(behind, "a<|im_end|>", [user("r")]) is None


def test_a_template_that_drops_reasoning_extends_only_turns_without() -> None:
    tokenizer = byte_tokenizer(REASONING)
    assert extend(tokenizer, "hm</think>b<|im_end|>", [user("r")]) is None
    assert extend(tokenizer, "b<|im_end|>", [user("r")]) == encode(
        tokenizer, "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    )


def test_history_rewritten_more_than_one_turn_back_is_seen() -> None:
    tokenizer = byte_tokenizer(
        REASONING.replace("not loop.last", "not loop.last and messages[-1].role == 'user'")
    )
    renderer = TurnRenderer(tokenizer)
    first, second = (encode(tokenizer, text) for text in ("h</think>a<|im_end|>", "b<|im_end|>"))
    messages = [user("q"), renderer.parse(first)]
    tokens = [*renderer.prompt([user("q")], ()), *first]
    appended = renderer.extend(tokens, len(first), messages, [tool("r")], ())
    assert appended is not None
    messages += [tool("r"), renderer.parse(second)]
    assert renderer.extend([*tokens, *appended, *second], len(second), messages, [user("u")], ()) is None
    assert renderer.extend([*tokens, *appended, *second], len(second), messages, [tool("u")], ()) is not None


def test_a_template_that_refuses_a_result_without_its_call_is_extended_too() -> None:
    tokenizer = byte_tokenizer(STRICT)
    call = '<tool_call>{"name":"add","arguments":{"a":[1, 2]}}</tool_call><|im_end|>'
    assert extend(tokenizer, call, [tool("3")], ADD) == encode(tokenizer, "[RESULT]3[/RESULT]")
    with pytest.raises(EpisodeFailed, match="a result without a call") as failure:
        extend(tokenizer, "no call<|im_end|>", [tool("3")], ADD)
    assert failure.value.kind == "environment"


def test_a_call_that_the_template_writes_as_another_is_rewritten_history() -> None:
    tokenizer = byte_tokenizer(TOOLS)
    call = '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call><|im_end|>'
    assert extend(tokenizer, call, [tool("3")], ADD) is None
    in_order = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    assert extend(tokenizer, in_order, [tool("3")], ADD) is not None


def test_text_of_the_data_that_looks_like_the_marker_does_not_mislead() -> None:
    tokenizer = byte_tokenizer()
    marker = "\ue000turn\ue001"
    assert extend(tokenizer, f"{marker}a<|im_end|>", [user(marker)]) == encode(
        tokenizer, f"\n<|im_start|>user\n{marker}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_cut_inside_a_character_is_extended_all_the_same() -> None:
    tokenizer = byte_tokenizer()
    renderer = TurnRenderer(tokenizer)
    turn = [*encode(tokenizer, "é")[:1], 2]
    messages = [user("q"), renderer.parse(turn)]
    tokens = [*renderer.prompt([user("q")], ()), *turn]
    assert messages[-1]["content"] == "\ufffd"
    assert renderer.extend(tokens, 2, messages, [user("r")], ()) == encode(
        tokenizer, "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_writes_no_tools_is_known() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert TurnRenderer(byte_tokenizer(TOOLS)).shows(tools)
    assert not TurnRenderer(byte_tokenizer(CHATML)).shows(tools)


def test_messages_that_are_no_text_or_that_the_template_refuses_fail_the_episode() -> None:
    renderer = TurnRenderer(byte_tokenizer(STRICT))
    for messages in ([user("\ud800")], [{"role": "user", "content": object()}], [user("q"), tool("r")]):
        with pytest.raises(EpisodeFailed) as failure:
            renderer.prompt(messages, ())
        assert failure.value.kind == "environment"


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(DataError, match=r"set model\.chat_template"):
        TurnRenderer(byte_tokenizer(None))
