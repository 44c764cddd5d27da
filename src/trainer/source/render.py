"""From a conversation to token ids and the mask of tokens that carry loss.

Tokens come from one full rendering of the conversation, as inference would see it. Which of them an assistant
turn produced is proven for each row; a row for which it cannot be proven is refused, never masked by guess.

Two ways, tried in this order:

* `renderers` has a hand-written renderer for some model families. It is used for a row if its ids equal those
  of the tokenizer's own template.
* Otherwise the template itself is asked. For assistant turn i the template renders the messages before it
  plus the generation prompt, and the whole conversation with the turn's text replaced by a marker. If the
  first is a prefix of the full text, and what stands behind the marker is a suffix of it, then the turn is
  exactly what lies between: no text is searched for, so no text in the data can mislead. To that comes the
  end-of-turn token: the first special token behind the turn, if only white space precedes it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from contract.chat import (
    check_chat_tokenizer,
    create_family_renderer,
    pick_marker,
    special_token_ids,
)
from trainer.source.conversation import Conversation, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Rendered:
    """One conversation as tokens.

    Attributes:
        tokens: [T] int32 token ids.
        trainable: [T] bool, True where the token is predicted with loss.
    """

    tokens: npt.NDArray[np.int32]
    trainable: npt.NDArray[np.bool_]


class ConversationRenderer:
    """Renders conversations with a tokenizer's chat template. Deterministic; holds no state between rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, last_only: bool) -> None:
        """
        Args:
            tokenizer: a fast tokenizer with its `chat_template` set.
            last_only: only the last assistant turn of a conversation carries loss.

        Raises:
            DataError: the tokenizer has no chat template, or is not a fast one (those alone know which
                characters a token stands for).
        """
        check_chat_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        self._last_only = last_only
        self._family = create_family_renderer(tokenizer)
        self._special_ids = special_token_ids(tokenizer)

    @property
    def method(self) -> str:
        """How rows are rendered, for the start-up summary."""
        return (
            "chat template"
            if self._family is None
            else f"chat template, checked with {type(self._family).__name__}"
        )

    def digest(self) -> str:
        """Identity of the rendering: equal digests render equal rows equally."""
        digest = hashlib.blake2b(digest_size=16)
        template = self._tokenizer.chat_template
        for part in (json.dumps(template, sort_keys=True), self._vocabulary(), self.method):
            digest.update(part.encode() + b"\0")
        digest.update(json.dumps([self._last_only, sorted(self._special_ids)]).encode())
        return digest.hexdigest()

    def _vocabulary(self) -> str:
        # Any: the attribute is declared with the type of every tokenizer attribute.
        backend: Any = self._tokenizer.backend_tokenizer
        return backend.to_str()

    def render(self, conversations: Sequence[Conversation]) -> list[Rendered | RowError]:
        """Render a batch; a row that cannot be rendered or attributed is a RowError."""
        texts: list[str | RowError] = []
        for conversation in conversations:
            try:
                texts.append(self._apply(conversation, conversation.messages))
            except RowError as error:
                texts.append(error)
        good = [text for text in texts if isinstance(text, str)]
        encoded = self._tokenizer(good, add_special_tokens=False, return_offsets_mapping=True) if good else {}
        ids, offsets = iter(encoded.get("input_ids", ())), iter(encoded.get("offset_mapping", ()))
        results: list[Rendered | RowError] = []
        for conversation, text in zip(conversations, texts, strict=True):
            if isinstance(text, RowError):
                results.append(text)
                continue
            tokens, spans = next(ids), next(offsets)
            try:
                results.append(self._attribute(conversation, text, tokens, spans))
            except RowError as error:
                results.append(error)
        return results

    def _apply(
        self, conversation: Conversation, messages: list[dict[str, Any]], *, prompt: bool = False
    ) -> str:
        options: dict[str, Any] = {} if conversation.tools is None else {"tools": conversation.tools}
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **options
            )
        except Exception as error:  # a template may fail in any way on a row that it was not written for
            raise RowError(
                "refused by the chat template", f"the chat template refuses the row: {error}"
            ) from error
        assert isinstance(text, str)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError("not Unicode text", f"the row holds half of a surrogate pair: {error}") from None
        return text

    def _attribute(
        self, conversation: Conversation, text: str, tokens: list[int], offsets: list[tuple[int, int]]
    ) -> Rendered:
        turns = conversation.assistant_turns(last_only=self._last_only)
        ids = np.asarray(tokens, dtype=np.int32)
        mask = None if self._family is None else _family_mask(self._family, conversation, turns, tokens)
        if mask is not None:
            return Rendered(ids, mask)
        trainable = np.zeros(len(tokens), dtype=np.bool_)
        begins = _token_begins(offsets)
        for turn in turns:
            start, end = self._find_turn(conversation, text, turn)
            first, behind = bisect_left(begins, start), bisect_left(begins, end)
            if start == end:
                raise _not_attributable(turn, "the template leaves out all of it (tool calls, say)")
            trainable[first : self._include_turn_end(text, tokens, offsets, behind)] = True
        return Rendered(ids, trainable)

    def _find_turn(self, conversation: Conversation, text: str, turn: int) -> tuple[int, int]:
        """Characters (begin, end) of an assistant turn, without its end-of-turn token."""
        messages = conversation.messages
        marker = pick_marker(text)
        replaced = {"role": "assistant", "content": marker}
        marked = self._apply(conversation, [*messages[:turn], replaced, *messages[turn + 1 :]])
        head, found, tail = marked.partition(marker)
        if not found or not text.endswith(tail):
            raise _not_attributable(turn, "what follows it in the rendering depends on its text")
        end = len(text) - len(tail)
        for prefix in (self._render_prompt(conversation, turn), head):
            if prefix is not None and text.startswith(prefix) and len(prefix) <= end:
                return len(prefix), end
        raise _not_attributable(turn, "what precedes it in the rendering depends on its text")

    def _render_prompt(self, conversation: Conversation, turn: int) -> str | None:
        """What inference would see before an assistant turn, or None where the template has no generation
        prompt.

        Only a generation prompt says which part of a turn's rendering is supplied and which is sampled. A
        template need not supply the same when it renders a history (an opened reasoning block, say); then
        this is no prefix of it.
        """
        history = conversation.messages[:turn]
        if not history:
            return None
        prompt = self._apply(conversation, history, prompt=True)
        return prompt if prompt != self._apply(conversation, history) else None

    def _include_turn_end(
        self, text: str, tokens: list[int], offsets: list[tuple[int, int]], behind: int
    ) -> int:
        """Index behind the end-of-turn token, if that is what comes at index `behind`; otherwise `behind`."""
        for index in range(behind, len(tokens)):
            if tokens[index] in self._special_ids:
                return index + 1
            if text[slice(*offsets[index])].strip():
                break
        return behind


def _not_attributable(turn: int, why: str) -> RowError:
    return RowError(
        "assistant tokens cannot be told apart",
        f"the tokens of `messages[{turn}]` cannot be told apart with this chat template: {why}",
    )


def _token_begins(offsets: list[tuple[int, int]]) -> list[int]:
    """First character of each token, never decreasing.

    Some tokenizers leave leading white space out of a token's span: it is given back, so that tokens cover
    the text.
    """
    begins, reached = [], 0
    for begin, end in offsets:
        begins.append(min(begin, reached))
        reached = max(reached, end)
    return begins


def _family_mask(
    family: Any, conversation: Conversation, turns: list[int], tokens: list[int]
) -> npt.NDArray[np.bool_] | None:
    """The family renderer's mask, or None if its tokens are not those of the tokenizer's own template."""
    from renderers import build_training_sample

    selected = [index in turns for index in range(len(conversation.messages))]
    try:
        sample = build_training_sample(
            family,
            conversation.messages,  # pyright: ignore[reportArgumentType]
            tools=conversation.tools,  # pyright: ignore[reportArgumentType]
            message_loss_mask=selected,  # pyright: ignore[reportArgumentType]
        )
    except Exception:  # the row has something that this renderer does not know; the template may
        return None
    return np.asarray(sample.loss_mask, dtype=np.bool_) if sample.token_ids == tokens else None
