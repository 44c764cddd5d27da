"""Shorthand for conversations in tests."""

from __future__ import annotations

from typing import Any


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def short_chats(num_rows: int) -> list[dict[str, Any]]:
    """Distinct conversations of unequal length; 27 tokens and more with one token per byte."""
    return [chat(user("u" * (index % 5 + 1)), assistant(f"row {index}")) for index in range(num_rows)]
