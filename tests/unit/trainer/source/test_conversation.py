"""What a row may hold, and the reason for which it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.source.chats import assistant, chat, system, tool, user
from trainer.source.conversation import RowError, parse_conversation

CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ([1], "not an object", "the row is a list"),
        ({"text": "x"}, "no messages", "holds `text`"),
        ({"prompt": "x"}, "no completion", "no `completion`"),
        ({"completion": "x"}, "no prompt", "no `prompt`"),
        ({"messages": "x"}, "wrong type", "`messages` is text"),
        ({"messages": []}, "no messages", "empty list"),
        ({"messages": ["x"]}, "wrong type", "`messages[0]` is text"),
        (chat(user("x")), "no assistant turn", "no assistant turn"),
        (chat(user("x"), assistant(" \n")), "empty assistant text", "`messages[1]`"),
        (chat(user("x"), {"role": "assistant"}), "wrong type", "`messages[1].content` is missing"),
        (
            chat({"role": "robot", "content": "x"}, assistant("y")),
            "unknown role",
            "'robot'; valid are system",
        ),
        (chat({"content": "x"}, assistant("y")), "unknown role", "`messages[0].role` is missing"),
        (chat({"role": ["user"], "content": "x"}, assistant("y")), "unknown role", "['user']"),
        (
            chat(user("x"), {"role": "assistant", "content": 3}),
            "wrong type",
            "`messages[1].content` is a number",
        ),
        (chat(user("x"), assistant("y"), tools="[{"), "wrong type", "`tools` is text that is not JSON"),
        (chat(user("x"), assistant("y"), tools={"name": "f"}), "wrong type", "`tools` is an object"),
        (chat(user("x"), assistant("", tool_calls=[{"id": "1"}])), "wrong type", "name of its function"),
        (chat(user("x"), assistant("y"), prompt="x"), "two layouts", "keep one layout"),
        (
            {"prompt": [user("x"), assistant("y")], "completion": [user("z")]},
            "no assistant turn",
            "no assistant",
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_with_its_reason(row: Any, reason: str, detail: str) -> None:
    with pytest.raises(RowError) as caught:
        parse_conversation(row)
    assert caught.value.reason == reason
    assert detail in caught.value.detail


def test_a_null_field_counts_as_absent() -> None:
    row = chat(user("x"), {"role": "assistant", "content": "y", "tool_calls": None}, prompt=None, tools=None)
    parsed = parse_conversation(row)
    assert parsed.messages == [user("x"), assistant("y")]
    assert parsed.tools is None


def test_an_empty_list_of_tools_is_not_an_absent_one() -> None:
    assert parse_conversation(chat(user("x"), assistant("y"), tools=[])).tools == []
    assert parse_conversation(chat(user("x"), assistant("y"), tools="[]")).tools == []
    assert parse_conversation(chat(user("x"), assistant("y"))).tools is None


def test_prompt_and_completion_may_each_be_text_or_messages() -> None:
    expected = [user("x"), assistant("y")]
    for prompt in ("x", [user("x")]):
        for completion in ("y", [assistant("y")]):
            assert parse_conversation({"prompt": prompt, "completion": completion}).messages == expected


def test_assistant_turns_of_a_prompt_carry_no_loss() -> None:
    parsed = parse_conversation({"prompt": [user("a"), assistant("b"), user("c")], "completion": "d"})
    assert parsed.assistant_turns(last_only=False) == [3]


def test_all_or_only_the_last_assistant_turn_carries_loss() -> None:
    parsed = parse_conversation(
        chat(system("s"), user("u"), assistant("a1"), user("u"), assistant("a2"), user("end"))
    )
    assert parsed.assistant_turns(last_only=False) == [2, 4]
    assert parsed.assistant_turns(last_only=True) == [4]


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_conversation(chat({"role": "user", "content": parts}, assistant("y"))).messages[0] == user(
        "ab"
    )
    with pytest.raises(RowError, match="a list with other things"):
        parse_conversation(chat({"role": "user", "content": [*parts, {"type": "image"}]}, assistant("y")))


def test_a_turn_of_tool_calls_needs_no_text_and_its_arguments_become_an_object() -> None:
    row = chat(user("x"), {"role": "assistant", "tool_calls": [CALL]}, tool("1"), assistant("y"))
    message = parse_conversation(row).messages[1]
    assert message["content"] == ""
    assert message["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}}]
