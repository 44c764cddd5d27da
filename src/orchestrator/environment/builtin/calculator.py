"""`calculator`: compute with a tool; the policy calls it, reads its reply, and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.environment.base import Message
from orchestrator.environment.builtin.arithmetic import Expressions
from orchestrator.environment.builtin.expression import evaluate
from orchestrator.environment.builtin.generated import (
    answer_of,
    last_number,
    user,
    whole,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 12 * (3 + 4)."}},
            "required": ["expression"],
        },
    },
}
"""The schema of the only tool."""

_MAX_CALLS = 4
"""Calls of one turn that are computed."""
_WRITTEN_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


class Calculator(Expressions):
    """A task: "What is 4821 * 377? Use the tool `calculate`, then answer with the number only."

    A turn with tool calls gets the reply of each: the value, or `Error: ` and what is wrong with the call. A
    turn without ends the episode. Calls are read from the message's `tool_calls`; where the chat template
    has no parser for them, `<tool_call>{"name": "calculate", "arguments": {"expression": "..."}}</tool_call>`
    in the text counts too, and is answered with a user message.

    The reward is 1 if the last whole number of the last turn is the right one (`correct`). Otherwise it is
    0.2 if the tool has given that number, 0.1 if a call has worked at all, and 0. `calls` that worked are
    logged beside it.

    Args:
        split: `train`, or `test` for held-out tasks.
        operators: those that are used, of `+`, `-` and `*`.
        digits: most digits of a number.
        num_terms: how many numbers are combined.
        max_turns: most turns of the policy.
        num_tasks: number of tasks.
        seed: another seed gives other tasks.
    """

    tools = (TOOL,)

    def __init__(
        self,
        split: str = "train",
        operators: str = "+-*",
        digits: int = 4,
        num_terms: int = 2,
        max_turns: int = 3,
        num_tasks: int = 100_000,
        seed: int = 0,
    ) -> None:
        super().__init__(split, operators, digits, num_terms, num_tasks, seed)
        self.max_turns = whole("max_turns", max_turns, 2, 100)
        self.task(0)

    def start(self, task: Mapping[str, Any]) -> list[Message]:
        expression = task["expression"]
        return [user(f"What is {expression}? Use the tool `calculate`, then answer with the number only.")]

    def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> list[Message] | None:
        calls = _calls(messages[-1])
        if not calls:
            return None
        replies = []
        for number, call in enumerate(calls):
            content = _run(call) if number < _MAX_CALLS else f"Error: at most {_MAX_CALLS} calls in one turn"
            if not content.startswith("Error"):
                state.setdefault("values", []).append(content)
            replies.append(_reply(call, content))
        return replies

    def reward(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> dict[str, float]:
        values = state.get("values", [])
        answer = "" if _calls(messages[-1]) else answer_of(messages)
        correct = last_number(answer) == int(task["answer"])
        reward = 1.0 if correct else 0.2 if task["answer"] in values else 0.1 if values else 0.0
        return {"reward": reward, "correct": float(correct), "calls": float(len(values))}


@dataclass(frozen=True, slots=True)
class _ToolCall:
    """A call as the policy made it; `error` says what is wrong with it, None if nothing.

    `written` is whether it stood in the text, so that the conversation knows of no call.
    """

    name: str = ""
    expression: str = ""
    number: str | None = None
    error: str | None = None
    written: bool = False


def _calls(message: Message) -> list[_ToolCall]:
    """The calls of the policy's turn; none if it made none."""
    structured = message.get("tool_calls")
    if structured:
        return [_parse(call, written=False) for call in structured]
    return [_parse(text, written=True) for text in _WRITTEN_CALL.findall(message.get("content") or "")]


def _parse(call: Any, *, written: bool) -> _ToolCall:
    number = call.get("id") if isinstance(call, Mapping) else None
    try:
        body = json.loads(call) if isinstance(call, str) else call
        body = body.get("function", body)
        name, arguments = body.get("name"), body.get("arguments")
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, AttributeError, RecursionError):
        return _ToolCall(number=number, error="the call is not valid JSON", written=written)
    if name != "calculate":
        error = f"there is no tool {str(name)[:40]!r}, only 'calculate'"
        return _ToolCall(str(name)[:40], number=number, error=error, written=written)
    expression = arguments.get("expression") if isinstance(arguments, Mapping) else None
    if not isinstance(expression, str):
        error = 'the arguments must be {"expression": "..."}'
        return _ToolCall(name, number=number, error=error, written=written)
    return _ToolCall(name, expression, number, None, written)


def _run(call: _ToolCall) -> str:
    if call.error is not None:
        return f"Error: {call.error}"
    try:
        return evaluate(call.expression)
    except ValueError as error:
        return f"Error: {error}"


def _reply(call: _ToolCall, content: str) -> Message:
    if call.written:
        return user(f"<tool_response>{content}</tool_response>")
    reply: Message = {"role": "tool", "content": content, "name": call.name or "calculate"}
    return reply if call.number is None else reply | {"tool_call_id": call.number}
