"""Chat data as a source of step batches (SFT): tokenised once, packed once, visited epoch by epoch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.console import Console

from trainer.config.data import ChatDataConfig
from trainer.source.cursor import PACKING_STREAM
from trainer.source.prepare import Preparation, Report, prepare_table
from trainer.source.reading import open_rows
from trainer.source.render import ConversationRenderer
from trainer.source.rows import PackedRows, RowSource
from trainer.source.table import TokenTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatSource(RowSource):
    """Conversations in seeded order, packed into rows of at most `seq_len` tokens. Implements `Source`."""

    def __init__(
        self,
        config: ChatDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        rank: int,
        world_size: int,
        seed: int,
        max_epochs: int | None,
        pad_rows: bool = False,
        cache_dir: Path | None = None,
        console: Console | None = None,
    ) -> None:
        """Read, tokenise (or find in the cache) and pack all rows.

        Args:
            config: the data.
            tokenizer: a fast tokenizer with its chat template set.
            rank, world_size: place among the data-parallel ranks; decides only what this rank gets of each
                update.
            seed: decides packing and the order of rows.
            max_epochs: passes over the data; None is endless.
            pad_rows: pad each row to `seq_len` (static shapes).
            cache_dir: folder of tokenised rows, `prepare.default_cache_dir()` say; None keeps them in memory
                only. Safe to share between processes, also at the same time.
            console: shows the progress of tokenising; None, as on all ranks but one, shows nothing.

        Raises:
            DataError: the data is missing, has bad rows that are not to be skipped, or leaves nothing to
                train on.
            ConfigError: the batch cannot be dealt evenly to `world_size` ranks.
        """
        source = open_rows(config)
        renderer = ConversationRenderer(tokenizer, last_only=config.loss_on == "last_assistant")
        how = Preparation(config.seq_len, config.on_bad_row, config.on_long_row, config.max_rows)
        table = prepare_table(source, renderer, how, cache_dir=cache_dir, console=console)
        rows = PackedRows(
            table,
            _packing_order(config, len(table), seed),
            capacity=config.seq_len if config.packing else None,
        )
        super().__init__(
            rows,
            config,
            identity={
                "rows": table.digest,
                "chat template and tokenizer": renderer.digest(),
                "data.seq_len": config.seq_len,
                "data.packing": config.packing,
                "data.shuffle": config.shuffle,
            },
            summary={"data": source.describe(), **_summary(table, rows, how), "rendering": renderer.method},
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=config.shuffle,
            max_epochs=max_epochs,
            pad_to=config.seq_len if pad_rows else None,
            pad_token=pad_token_of(tokenizer),
        )


def _summary(table: TokenTable, rows: PackedRows, how: Preparation) -> dict[str, str]:
    return {
        "conversations": Report.from_json(table.report).describe(len(table), how),
        "tokens": describe_tokens(table),
        "rows per epoch": describe_rows(table, len(rows), how.seq_len),
    }


def _packing_order(config: ChatDataConfig, num_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """Drawn once: the same conversations share a row in every epoch, and the order of rows is new in each."""
    if not (config.packing and config.shuffle):
        return np.arange(num_rows)
    return np.random.default_rng([seed, 0, PACKING_STREAM]).permutation(num_rows)


def pad_token_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id used for padding; it carries no loss, so any will do where the tokenizer names none."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def describe_tokens(table: TokenTable) -> str:
    """Tokens of a table and the part of them that carries loss, for the start-up summary."""
    num_trainable = np.count_nonzero(table.trainable)
    return f"{len(table.tokens):,} ({num_trainable / len(table.tokens):.0%} with loss)"


def describe_rows(table: TokenTable, num_rows: int, seq_len: int) -> str:
    """Rows and how full they are, for the start-up summary."""
    return f"{num_rows:,} of at most {seq_len:,} tokens, {len(table.tokens) / (num_rows * seq_len):.0%} full"
