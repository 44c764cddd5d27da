"""Token ids of OpenAI prompts: texts, ids, and messages through the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inference.openai_api.bodies import ChatBody
from inference.refusal import refuse_openai

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal"})


def tokens_of_prompts(tokenizer: PreTrainedTokenizerBase, prompt: str | list[Any]) -> list[list[int]]:
    """Token ids of each prompt of a completion.

    Raises:
        Refused: it is neither text nor ids, nor a list of one of them.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    if prompt and all(isinstance(item, str) for item in prompt):
        return [list(tokenizer(text)["input_ids"]) for text in prompt]
    if _are_ids(prompt):
        return [prompt]
    if prompt and all(isinstance(item, list) and _are_ids(item) for item in prompt):
        return prompt
    raise refuse_openai(
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists, and not empty",
        "prompt",
    )


def tokens_of_chat(tokenizer: PreTrainedTokenizerBase, body: ChatBody) -> list[int]:
    """Token ids of messages, up to where the answer begins.

    Raises:
        Refused: a message is not text, or the chat template does not take them.
    """
    if not tokenizer.chat_template:
        raise refuse_openai(
            "the model has no chat template: set model.chat_template in the server's configuration, or use "
            "/v1/completions"
        )
    if not body.messages:
        raise refuse_openai("messages is empty", "messages")
    messages = [_message(index, message) for index, message in enumerate(body.messages)]
    try:
        tokens: Any = tokenizer.apply_chat_template(
            messages,
            tools=body.tools or None,  # pyright: ignore[reportArgumentType]
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **body.chat_template_kwargs,
        )
    except Exception as error:  # a template is code of the model's author, and may raise anything
        raise refuse_openai(
            f"the chat template does not take these messages: {type(error).__name__}: {error}", "messages"
        ) from error
    return list(tokens)


def _message(index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """As chat templates expect it: content is one text, arguments of calls are objects."""
    where = f"messages[{index}]"
    message = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(message.keys() - _FIELDS)
    if unknown:
        raise refuse_openai(f"{where}: {', '.join(unknown)} is not supported by this server", "messages")
    if not isinstance(message.get("role"), str):
        raise refuse_openai(f"{where} has no role", "messages")
    message["content"] = _content(where, message.get("content", ""))
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(where, message["tool_calls"])
    return message


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise refuse_openai(f"{where}.content: only text is supported by this server", "messages")
        parts.append(text)
    return "".join(parts)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = []
    try:
        for call in calls:
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
            parsed.append({**call, "function": function})
    except (TypeError, KeyError, ValueError) as error:
        raise refuse_openai(
            f"{where}.tool_calls: {type(error).__name__}: {error}; each must have a function with a name and "
            f"arguments in JSON",
            "messages",
        ) from error
    return parsed


def _are_ids(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, int) and not isinstance(item, bool) for item in items)
