"""Tokenizers, an environment and a policy by script, for the tests of episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from contract.policy import FinishReason, GenerateResponse, Sampling

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes tools and calls, each call with spaces of its own; trims what the policy wrote.
TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning is shown in the last turn only.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Message = dict[str, Any]


def byte_tokenizer(
    template: str | None = CHATML, merges: Sequence[tuple[str, str]] = ()
) -> PreTrainedTokenizerFast:
    """One token per byte and one per merge; <|endoftext|>, <|im_start|>, <|im_end|> are 0, 1, 2."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *alphabet, *(first + second for first, second in merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def join(tokenizer: Any, *pieces: tuple[str, bool]) -> tuple[list[int], list[bool]]:
    """Tokens of pieces of text, and for each whether its piece was sampled."""
    tokens: list[int] = []
    is_sampled: list[bool] = []
    for text, sampled in pieces:
        ids = encode(tokenizer, text)
        tokens += ids
        is_sampled += [sampled] * len(ids)
    return tokens, is_sampled


class ScriptedPolicy:
    """Answers with given tokens, one turn after the other; token k of turn t was sampled by version
    `first_version + t` with log-probability -(t + 1) - k / 100.
    """

    def __init__(self, *turns: list[int], end: FinishReason = "stop", first_version: int = 0) -> None:
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.request_ids: list[str] = []
        self._turns = turns
        self._end: FinishReason = end
        self._first_version = first_version

    async def generate(self, prompt: list[int], sampling: Sampling, request_id: str) -> GenerateResponse:
        turn = len(self.prompts)
        self.prompts.append(list(prompt))
        self.samplings.append(sampling)
        self.request_ids.append(request_id)
        tokens = self._turns[turn]
        end: FinishReason = self._end if turn + 1 == len(self._turns) else "stop"
        logprobs = [-(turn + 1) - k / 100 for k in range(len(tokens))]
        versions = [self._first_version + turn] * len(tokens)
        return GenerateResponse(request_id, tokens, logprobs, versions, end)


class ScriptedSource:
    """Begins with `start`, answers turn t with `replies[t]`, and keeps what it was asked."""

    def __init__(
        self,
        start: list[Message],
        replies: Sequence[list[Message] | None] = (),
        *,
        max_turns: int = 1,
        tools: Sequence[Mapping[str, Any]] = (),
        reward: Callable[[list[Message]], float] = lambda _messages: 1.0,
    ) -> None:
        self.max_turns = max_turns
        self.tools = tools
        self.responded: list[list[Message]] = []
        self.rewarded: list[tuple[list[Message], dict[str, Any]]] = []
        self._start = start
        self._replies = replies
        self._reward = reward

    async def start(self, task: Mapping[str, Any]) -> list[Message]:
        return self._start

    async def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> tuple[list[Message] | None, dict[str, Any]]:
        turn = len(self.responded)
        self.responded.append(list(messages))
        return self._replies[turn], {"turns": state.get("turns", 0) + 1}

    async def reward(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> dict[str, float]:
        self.rewarded.append((list(messages), state))
        return {"reward": self._reward(messages), "length": float(len(messages))}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}
