"""Held-out conversations, dealt to the ranks once. Has no position: every validation sees the same rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from contract.batch import MicroBatch
from trainer.config.data import ChatDataConfig, ValidationConfig
from trainer.source.cursor import deal
from trainer.source.dataset import describe_tokens, pad_token_of
from trainer.source.prepare import Preparation, Report, prepare_table
from trainer.source.reading import open_rows
from trainer.source.render import ConversationRenderer
from trainer.source.rows import PackedRows, build_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ValidationRows:
    """Rows rendered, packed and cut as the training data is, in file order. Implements `ValidationSource`."""

    def __init__(
        self,
        config: ValidationConfig,
        data: ChatDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        rank: int,
        world_size: int,
        pad_rows: bool = False,
        cache_dir: Path | None = None,
        console: Console | None = None,
    ) -> None:
        """Read, tokenise and pack all rows.

        Args:
            config: the held-out data.
            data: the training data, whose `seq_len`, `packing`, `loss_on`, `on_bad_row`, `on_long_row` and
                `micro_batch_size` hold here too.
            tokenizer, rank, world_size, pad_rows, cache_dir, console: as for `ChatSource`.

        Raises:
            DataError: the data is missing, has bad rows that are not to be skipped, or leaves nothing to
                validate on.
        """
        source = open_rows(config, section="validation")
        renderer = ConversationRenderer(tokenizer, last_only=data.loss_on == "last_assistant")
        how = Preparation(
            data.seq_len, data.on_bad_row, data.on_long_row, config.max_rows, section="validation"
        )
        table = prepare_table(source, renderer, how, cache_dir=cache_dir, console=console)
        self._rows = PackedRows(table, np.arange(len(table)), capacity=data.seq_len if data.packing else None)
        num_per_rank = math.ceil(len(self._rows) / world_size)
        self._dealt = deal(
            range(len(self._rows)),
            rank=rank,
            world_size=world_size,
            micro_batch_rows=min(data.micro_batch_size, num_per_rank),
        )
        self._pad_to, self._pad_token = data.seq_len if pad_rows else None, pad_token_of(tokenizer)
        conversations = Report.from_json(table.report).describe(len(table), how)
        self._summary = {
            "validation": f"{source.describe()}: {conversations}; tokens: {describe_tokens(table)}"
        }

    def micro_batches(self) -> Iterator[MicroBatch]:
        """This rank's rows, the same every time; every rank yields the same number, padding at the end."""
        for numbers in self._dealt:
            yield build_rows(self._rows, numbers, pad_to=self._pad_to, pad_token=self._pad_token)

    def summary(self) -> dict[str, str]:
        """Lines for the start-up summary: title and value."""
        return dict(self._summary)
