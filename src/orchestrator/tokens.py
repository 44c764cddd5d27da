"""Messages to tokens, and sampled tokens to messages, with the tokenizer's chat template.

An episode is one growing list of token ids: what was sampled stays as it was sampled, and what follows a turn
is appended to it. So only the appended text is ever tokenised, and history is never rendered into tokens
again.

What is appended is found in renderings of the template, not written by hand. The conversation before an
assistant turn with its generation prompt (B), and that with the turn, the new messages and their generation
prompt (F), are rendered; F once more with a marker as the turn's text. If B is the beginning of F, and what
stands behind the marker is its end (E), and what lies between is what was sampled but for white space, then F
is B + turn + E, and E is appended. Otherwise the template rewrites history (drops reasoning of earlier turns,
say), and no list of tokens can grow into F.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from contract.chat import check_chat_tokenizer, create_family_renderer, pick_marker, special_token_ids
from orchestrator.environment.base import Message
from orchestrator.environment.failure import EpisodeFailed
from orchestrator.parse import Tools, parse_turn, parse_with_family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHED_PROMPTS = 256
_PROBE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]


class TurnRenderer:
    """Deterministic; holds nothing but a small cache of prompts, which the episodes of a group share."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """
        Args:
            tokenizer: a fast tokenizer with its `chat_template` set.

        Raises:
            DataError: the tokenizer has no chat template, or is not a fast one.
        """
        check_chat_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        self._special_ids = special_token_ids(tokenizer)
        self._family = self._check_family(create_family_renderer(tokenizer))
        self._keeps_calls = self._probe_calls()
        self._prompts: OrderedDict[bytes, list[int]] = OrderedDict()
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self.stop_ids: list[int] = self._find_stop_ids()
        """Tokens that end a turn: the tokenizer's end of sequence, and the template's end of a turn."""

    def shows(self, tools: Tools) -> bool:
        """Whether the template writes tools: one that does not leaves the policy without any word of them."""
        marker = pick_marker("")
        named = [{**tool, "function": {**tool.get("function", {}), "name": marker}} for tool in tools]
        try:
            return marker in self._apply(_PROBE[:1], named, prompt=True)
        except EpisodeFailed:  # what it refuses is told with the first episode
            return True

    def can_fit(self, messages: Sequence[Message], seq_len: int) -> bool:
        """Whether these texts might have no more than `seq_len` tokens, by their length alone: megabytes take
        seconds to tokenise, in which no other episode goes on.
        """
        num_characters = sum(len(message.get("content") or "") for message in messages)
        return num_characters <= seq_len * self._longest_token

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The ids of a whole conversation and the generation prompt; shared, so copy the list to change it.

        Raises:
            EpisodeFailed: the chat template refuses the messages (`environment`).
        """
        try:
            key = msgspec.json.encode((messages, tools))
        except (TypeError, ValueError) as error:
            raise EpisodeFailed("environment", f"messages must be JSON values: {error}") from error
        known = self._prompts.get(key)
        if known is None:
            known = self._encode(self._apply(messages, tools, prompt=True))
            self._prompts[key] = known
            if len(self._prompts) > _CACHED_PROMPTS:
                self._prompts.popitem(last=False)
        else:
            self._prompts.move_to_end(key)
        return known

    def extend(
        self,
        tokens: Sequence[int],
        num_sampled: int,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools,
    ) -> list[int] | None:
        """The ids to append after a turn, so that the next one can be drawn.

        Args:
            tokens: of the conversation up to the turn; the last `num_sampled` are the turn as sampled.
            messages: the conversation; the last is the turn.
            new_messages: what follows it.
            tools: the same as for all earlier tokens.

        Returns:
            None if no list of ids that begins with `tokens` stands for the new conversation; then the episode
            goes on in a new sample, from `prompt` of the new conversation.

        Raises:
            EpisodeFailed: the chat template refuses the messages (`environment`).
        """
        sampled = list(tokens[len(tokens) - num_sampled :])
        text = self._find_appended(self._decode_turn(sampled), messages, new_messages, tools)
        return None if text is None else self._encode_appended(text, sampled[-1])

    def parse(
        self,
        tokens: Sequence[int],
        tools: Tools = (),
        *,
        prompt: Sequence[int] = (),
        num_calls: int = 0,
    ) -> Message:
        """The message that a sampled turn stands for: text without the token that ended it, and `tool_calls`.

        Args:
            tokens: of the turn, as sampled.
            tools: that the policy was offered; without any, no call is looked for.
            prompt: that it was sampled after (it may have opened a reasoning block).
            num_calls: of earlier turns; ids of calls count on from there.
        """
        turn = list(tokens)
        if self._family is not None:
            message = parse_with_family(self._family, turn, tools, prompt=list(prompt), num_calls=num_calls)
            if message is not None:
                return message
        return parse_turn(self._decode_turn(turn), tools, num_calls=num_calls, keeps_calls=self._keeps_calls)

    def _find_appended(
        self, sampled: str, messages: Sequence[Message], new_messages: Sequence[Message], tools: Tools
    ) -> str | None:
        """The text behind the turn `messages[-1]`, of which `sampled` is the text; None as in `extend`."""
        history = list(messages[:-1])
        before = self._apply(history, tools, prompt=True)
        after = self._apply([*messages, *new_messages], tools, prompt=True)
        ending = self._find_behind(pick_marker(after), history, new_messages, tools, prompt=True)
        if ending is None:
            ending = self._find_behind_last(after, messages, tools)
        if ending is None or not after.startswith(before) or not after.endswith(ending):
            return None
        middle = after[len(before) : len(after) - len(ending)]
        # Templates trim, and write calls with spaces of their own; that is no other history.
        return ending if _without_space(middle) == _without_space(sampled) else None

    def _find_behind(
        self,
        marker: str,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools,
        *,
        prompt: bool,
    ) -> str | None:
        """What the template writes behind an assistant turn; None if it cannot be asked."""
        marked = {"role": "assistant", "content": marker}
        try:
            text = self._apply([*history, marked, *new_messages], tools, prompt=prompt)
        except EpisodeFailed:  # tool results that answer no call, say
            return None
        _, found, ending = text.partition(marker)
        return ending if found and marker not in ending else None

    def _find_behind_last(self, after: str, messages: Sequence[Message], tools: Tools) -> str | None:
        """As `_find_behind`, for a template that refuses the marker.

        The turn ends at the last special token of the conversation that it is the last turn of.
        """
        try:
            last = self._apply(messages, tools)
        except EpisodeFailed:
            return None
        marks = [mark for mark in map(self._decode, self._special_ids) if last.rstrip().endswith(mark)]
        if not marks or not after.startswith(last):
            return None
        return after[last.rindex(max(marks, key=len)) :]

    def _encode_appended(self, text: str, last: int) -> list[int] | None:
        """The ids of `text` behind a turn that ended with the token `last`."""
        ids = self._encode(text)
        if not ids:
            return None
        if last not in self.stop_ids:
            # A stop text ended the turn. What stands between it and the next is supplied, all of it.
            return ids if ids[0] in self._special_ids else None
        for position, index in enumerate(ids):
            if index == last:
                return ids[position + 1 :]
            if index in self._special_ids or self._decode(index).strip():
                break
        return None

    def _decode_turn(self, tokens: list[int]) -> str:
        ended = tokens and tokens[-1] in self.stop_ids
        return self._decode(tokens[:-1] if ended else tokens)

    def _decode(self, tokens: int | list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _apply(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> str:
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **options
            )
            assert isinstance(text, str)
        except Exception as error:  # a template may fail in any way on what it was not written for
            raise EpisodeFailed("environment", f"the chat template refuses the messages: {error}") from error
        return text

    def _find_stop_ids(self) -> list[int]:
        found: list[int] = []
        eos = self._tokenizer.eos_token_id
        if isinstance(eos, int):
            found.append(eos)
        ending = self._find_behind(pick_marker(""), _PROBE[:1], [], (), prompt=False)
        for index in self._encode(ending or ""):
            if index in self._special_ids:
                found.append(index)
            elif not self._decode(index).strip():
                continue
            break
        if self._family is not None:
            found += self._family.get_stop_token_ids()
        return list(dict.fromkeys(found))

    def _probe_calls(self) -> bool:
        """Whether the template writes `tool_calls`."""
        marker = pick_marker("")
        calls = [{"type": "function", "id": "call00000", "function": {"name": marker, "arguments": {"a": 1}}}]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        result = {"role": "tool", "content": "1", "tool_call_id": "call00000"}
        for messages in ([_PROBE[0], turn], [_PROBE[0], turn, result]):
            try:
                if marker in self._apply(messages, ()):
                    return True
            except EpisodeFailed:  # calls without their results, say
                continue
        return False

    def _check_family(self, family: Any | None) -> Any | None:
        """`family` if it writes the same as the tokenizer's own template; only then does it read the same."""
        if family is None:
            return None
        for messages, prompt in ((_PROBE[:1], True), (_PROBE, False), ([*_PROBE, *_PROBE[:1]], True)):
            try:
                ids = family.render_ids(messages, add_generation_prompt=prompt)
                if list(ids) != self._encode(self._apply(messages, (), prompt=prompt)):
                    return None
            except Exception:  # neither may know such a conversation
                return None
        return family


def _without_space(text: str) -> str:
    return "".join(text.split())
