"""Text of a sequence while it is drawn: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from contract.policy import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 5
_MAX_OPEN_TOKENS = 32


class TextStream:
    """Turns drawn tokens into text, piece by piece; the pieces together are the text of the sequence.

    A character whose bytes are spread over tokens comes when it is complete. The end of the text is held
    back while it could be the beginning of a stop text; a stop text and what follows it are cut off, and an
    end token has no text. Special tokens have none either.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop: Sequence[str],
        end_ids: Sequence[int],
    ) -> None:
        """
        Args:
            prompt: its last tokens are the context: whether a token begins with a space may depend on them.
            stop, end_ids: of the sequence's sampling.
        """
        self._tokenizer = tokenizer
        self._stop = stop
        self._end_ids = frozenset(end_ids)
        # Tokens whose text is told are context now; `_open` are those whose text is not complete.
        self._context = list(prompt[-_CONTEXT_TOKENS:])
        self._open: list[int] = []
        self._text = ""
        self._num_given = 0
        self.offsets: list[int] = []
        """Where the text of each token begins, in characters."""

    def push(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> str:
        """The text that is certain now and was not before."""
        begin = len(self._text)
        for index, token in enumerate(tokens):
            begin = len(self._text)
            self.offsets.append(begin)
            is_last = finish_reason == "stop" and index == len(tokens) - 1
            if not (is_last and token in self._end_ids):
                self._open.append(token)
                self._decode(is_end=False)
        if finish_reason is None:
            until = max(self._num_given, len(self._text) - self._num_held_back())
        else:
            self._decode(is_end=True)
            until = len(self._text)
            if finish_reason == "stop" and not (tokens and tokens[-1] in self._end_ids):
                until = max(self._num_given, self._find_stop(begin))
        piece = self._text[self._num_given : until]
        self._num_given = until
        return piece

    def _decode(self, *, is_end: bool) -> None:
        """Add the text of the open tokens, if it is complete or nothing more will come."""
        if not self._open:
            return
        before = self._decoded(self._context)
        whole = self._decoded(self._context + self._open)
        # Bytes that are no text at all must not be looked at again for ever.
        is_complete = not whole.endswith(_REPLACEMENT) or len(self._open) >= _MAX_OPEN_TOKENS
        if is_complete or is_end:
            self._text += whole[len(before) :]
            self._context = (self._context + self._open)[-_CONTEXT_TOKENS:]
            self._open = []

    def _decoded(self, tokens: list[int]) -> str:
        text: Any = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _num_held_back(self) -> int:
        """Length of the longest end of the text with which a stop text begins."""
        longest = max((len(stop) for stop in self._stop), default=0)
        for length in range(min(longest - 1, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0

    def _find_stop(self, begin: int) -> int:
        """Where the stop text begins that a token completed whose text begins at `begin`."""
        # One that was complete before (which min_tokens allows) ended nothing.
        ends = [self._text.find(stop, max(0, begin - len(stop) + 1)) for stop in self._stop]
        if all(end < 0 for end in ends):
            ends = [self._text.find(stop) for stop in self._stop]
        return min((end for end in ends if end >= 0), default=len(self._text))
