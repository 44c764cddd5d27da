"""From the text of a sampled turn to an assistant message, with its tool calls.

Tool calls are read where tools are offered, from `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
(the Hermes format), or by the hand-written renderer of the model's family. A call that is malformed stays
what it is, text: nothing is mended, and the environment sees what the policy wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.environment.base import Message

Tools = Sequence[Mapping[str, Any]]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MAX_DEPTH = 64


def parse_turn(text: str, tools: Tools, *, num_calls: int, keeps_calls: bool) -> Message:
    """The message that a turn's `text` stands for.

    Args:
        text: without the token that ended the turn.
        tools: that the policy was offered; without any, there are no calls.
        num_calls: of earlier turns; ids of calls count on from there.
        keeps_calls: whether the chat template writes `tool_calls` itself. Then the text of well-formed calls
            is taken out of `content`; otherwise it is left there, so that history shows it.
    """
    if not tools:
        return {"role": "assistant", "content": text}
    calls: list[dict[str, Any]] = []
    rest, reached = [], 0
    for match in _CALL.finditer(text):
        call = _read_call(match[1])
        if call is not None:
            calls.append(call)
            rest.append(text[reached : match.start()])
            reached = match.end()
    if not calls:
        return {"role": "assistant", "content": text}
    rest.append(text[reached:])
    content = "".join(rest).strip() if keeps_calls else text
    return _with_calls(content, calls, num_calls)


def parse_with_family(
    family: Any, tokens: list[int], tools: Tools, *, prompt: list[int], num_calls: int
) -> Message | None:
    """As the family's renderer reads a turn; None if it cannot, or finds a malformed call."""
    from renderers.base import ToolCallParseStatus

    try:
        parsed = family.parse_response(tokens, tools=list(tools) or None, prompt_ids=prompt)
    except Exception:  # text of a policy in training may be anything
        return None
    calls: list[dict[str, Any]] = []
    for call in parsed.tool_calls:
        arguments = _as_object(call.arguments)
        if call.status is not ToolCallParseStatus.OK or call.name is None or arguments is None:
            return None
        calls.append({"name": call.name, "arguments": arguments})
    if calls and not (tools and _is_strict(calls)):
        return None
    message = _with_calls(parsed.content, calls, num_calls)
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = parsed.reasoning_content
    return message


def _with_calls(content: str, calls: list[dict[str, Any]], num_calls: int) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        # Nine characters: some chat templates refuse ids of another length.
        message["tool_calls"] = [
            {"type": "function", "id": f"call{num_calls + index:05d}", "function": call}
            for index, call in enumerate(calls)
        ]
    return message


def _read_call(text: str) -> dict[str, Any] | None:
    value = _read_json(text.strip())
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = _as_object(value.get("arguments", {}))
    return None if arguments is None else {"name": value["name"], "arguments": arguments}


def _as_object(arguments: Any) -> dict[str, Any] | None:
    """Arguments as an object; they may come as the JSON text of one."""
    if isinstance(arguments, str):
        arguments = _read_json(arguments)
    return arguments if isinstance(arguments, dict) and not _is_deep(arguments) else None


def _read_json(text: str) -> Any:
    """The value, or None for a text that is no JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


def _is_strict(value: Any) -> bool:
    """Whether JSON can hold what a lenient reader has found: not NaN, and not half a surrogate pair."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


def _is_deep(value: Any) -> bool:
    """Whether values nest so deep that a template or the way to a worker process may fail on it."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
