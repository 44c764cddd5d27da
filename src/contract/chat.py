"""What the masks of SFT and the episodes of RL both ask of a tokenizer with a chat template.

Owns the marker by which a turn is found in a rendering, the set of special tokens, and the choice of a
hand-written renderer. Neither transformers nor `renderers` is imported before it is needed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from contract.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = "\ue000turn\ue001"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_chat_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Raises:
        DataError: the tokenizer has no chat template, or is not a fast one (those alone know which characters
            a token stands for).
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so conversations cannot be "
            "rendered; set model.chat_template, or take an instruction-tuned model's tokenizer "
            "(model.tokenizer)"
        )
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path!r} is not a fast one, so tokens cannot be traced to "
            "their text; set model.tokenizer to a folder with a tokenizer.json"
        )


def pick_marker(text: str) -> str:
    """A text that stands for an assistant turn and does not occur in `text`.

    Private-use characters, which no template treats otherwise than text.
    """
    marker = _MARKER
    while marker in text:
        marker += _MARKER
    return marker


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that structure a text and stand for none of it."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(special | set(tokenizer.all_special_ids))


def create_family_renderer(tokenizer: PreTrainedTokenizerBase) -> Any | None:
    """The hand-written renderer of the tokenizer's model family, if there is one.

    Looked up by name here: the library's own choice asks the Hub about every name that it does not know.
    """
    if not _HUB_ID.fullmatch(tokenizer.name_or_path):
        return None
    from renderers import config_from_name, create_renderer  # imported here: it takes seconds
    from renderers.base import MODEL_RENDERER_MAP

    family = MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    if family is None:
        return None
    try:
        return create_renderer(tokenizer, config_from_name(family))  # pyright: ignore[reportArgumentType]
    except Exception:  # the tokenizer has the model's name, but not its tokens: the template is asked instead
        return None
