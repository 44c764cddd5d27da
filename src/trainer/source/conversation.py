"""One row of a data set as a conversation: what a row may hold, and why a row is refused.

Owns the shape of rows (`messages`, or `prompt` + `completion`; `tools`). Whatever passes here is well typed
and has an assistant turn with text; whether a template can render it is left to `render`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")


class RowError(Exception):
    """A row that cannot be trained on.

    Attributes:
        reason: the same text for all rows with this fault, by which they are counted.
        detail: what is wrong with this row.
    """

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail or reason


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked row.

    Attributes:
        messages: role and text of each turn, with the optional fields of the row (tool calls, reasoning);
            none is null.
        tools: tool definitions for the template; None if the row has none, which differs from an empty list.
        first_trainable: messages before this one carry no loss (the prompt of a prompt and completion).
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    first_trainable: int

    def assistant_turns(self, *, last_only: bool) -> list[int]:
        """Indices of the assistant messages that carry loss."""
        turns = [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and index >= self.first_trainable
        ]
        return turns[-1:] if last_only else turns


def parse_conversation(row: Any) -> Conversation:
    """Check one row.

    Raises:
        RowError: the row is not an object, lacks messages, has one of an unknown role or of a wrong type, has
            no assistant turn or one without text.
    """
    if not isinstance(row, Mapping):
        raise RowError("not an object", f"the row is {_kind(row)}, not an object with `messages`")
    messages, prompt, completion = (row.get(name) for name in ("messages", "prompt", "completion"))
    if messages is not None and (prompt is not None or completion is not None):
        raise RowError(
            "two layouts", "the row has `messages` and also `prompt` or `completion`; keep one layout"
        )
    if messages is not None:
        parsed, first_trainable = _parse_messages(messages, "messages"), 0
    elif prompt is not None and completion is not None:
        before = _parse_part(prompt, "prompt", role="user")
        parsed, first_trainable = (
            before + _parse_part(completion, "completion", role="assistant"),
            len(before),
        )
    else:
        missing = "completion" if prompt is not None else "prompt" if completion is not None else "messages"
        found = ", ".join(f"`{name}`" for name in row) or "nothing"
        raise RowError(f"no {missing}", f"the row has no `{missing}`; it holds {found}")
    if not any(message["role"] == "assistant" for message in parsed[first_trainable:]):
        raise RowError("no assistant turn", "no message to train on: the row has no assistant turn")
    return Conversation(parsed, _parse_tools(row.get("tools")), first_trainable)


def _parse_part(value: Any, name: str, *, role: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [_parse_message({"role": role, "content": value}, name)]
    return _parse_messages(value, name)


def _parse_messages(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RowError("wrong type", f"`{name}` is {_kind(value)}, not a list of messages")
    if not value:
        raise RowError("no messages", f"`{name}` is an empty list")
    return [_parse_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _parse_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RowError("wrong type", f"`{name}` is {_kind(message)}, not an object with role and content")
    # Columnar files give every message the union of all fields; a null there is a field that the message
    # lacks.
    parsed = {key: value for key, value in message.items() if value is not None}
    role = parsed.get("role")
    if role not in ROLES:
        found = "missing" if role is None else repr(role)
        raise RowError("unknown role", f"`{name}.role` is {found}; valid are {', '.join(ROLES)}")
    parsed["content"] = _parse_content(parsed.get("content"), name, may_lack=bool(parsed.get("tool_calls")))
    if "tool_calls" in parsed:
        parsed["tool_calls"] = _parse_tool_calls(parsed["tool_calls"], f"{name}.tool_calls")
    if role == "assistant" and not parsed["content"].strip() and not parsed.get("tool_calls"):
        raise RowError("empty assistant text", f"`{name}` is an assistant turn without text")
    return parsed


def _parse_content(content: Any, name: str, *, may_lack: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    found = "missing" if content is None else _kind(content)
    raise RowError("wrong type", f"`{name}.content` is {found}; valid is text, or a list of text parts")


def _parse_tool_calls(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise RowError("wrong type", f"`{name}` is {_kind(value)}, not a list of objects")
    calls = []
    for call in value:
        call = {key: item for key, item in call.items() if item is not None}
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError("wrong type", f"`{name}` has a call without the name of its function")
        function = {**function, "arguments": _decode_arguments(function.get("arguments"))}
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def _decode_arguments(arguments: Any) -> Any:
    """Arguments as an object, also if they came as its JSON text: templates walk over objects."""
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return decoded if isinstance(decoded, dict) else arguments
    return {} if arguments is None else arguments


def _parse_tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RowError("wrong type", f"`tools` is text that is not JSON: {error}") from None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError("wrong type", f"`tools` is {_kind(tools)}, not a list of objects")
    return [dict(tool) for tool in tools]


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text"}
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list with other things" if value else "an empty list"
    return names.get(type(value), f"of type {type(value).__name__}")
