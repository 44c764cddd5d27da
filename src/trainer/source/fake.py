"""Random tokens as a source of step batches, for benchmarks. Reads nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from contract.batch import Sample
from trainer.config.data import FakeDataConfig
from trainer.source.cursor import TOKEN_STREAM
from trainer.source.rows import RowSource
from trainer.source.table import COMPONENT


class FakeRows:
    """Rows of `seq_len` random tokens, each made from seed and number when it is asked for."""

    def __init__(self, config: FakeDataConfig, *, vocab_size: int, seed: int) -> None:
        self._num_rows, self._vocab_size, self._seed = config.num_rows, vocab_size, seed
        step = config.document_len or config.seq_len
        starts = range(0, config.seq_len, step)
        self._spans = [(start, min(start + step, config.seq_len)) for start in starts]

    def __len__(self) -> int:
        """Number of rows."""
        return self._num_rows

    def samples(self, row: int) -> list[Sample]:
        """Documents of row `row`; every token carries loss but the first, which nothing predicts."""
        random = np.random.default_rng([self._seed, row, TOKEN_STREAM])
        tokens = random.integers(0, self._vocab_size, self._spans[-1][1])
        return [
            Sample(
                tokens[start:end],
                {COMPONENT: np.ones(end - start, dtype=np.float32)},
                row * len(self._spans) + index,
            )
            for index, (start, end) in enumerate(self._spans)
        ]

    def count_samples(self, rows: npt.NDArray[np.int64]) -> int:
        """Documents in all of `rows`."""
        return len(rows) * len(self._spans)


class FakeSource(RowSource):
    """Full rows of random tokens, in file order. Implements `Source`."""

    def __init__(
        self,
        config: FakeDataConfig,
        *,
        vocab_size: int,
        rank: int,
        world_size: int,
        seed: int,
        max_epochs: int | None,
    ) -> None:
        """
        Args:
            config: shape of the rows.
            vocab_size: tokens are drawn evenly from 0..vocab_size - 1.
            rank, world_size: place among the data-parallel ranks.
            seed: decides the tokens.
            max_epochs: passes over the rows; None is endless.

        Raises:
            ConfigError: the batch cannot be dealt evenly to `world_size` ranks.
        """
        num_tokens = config.num_rows * config.seq_len
        super().__init__(
            FakeRows(config, vocab_size=vocab_size, seed=seed),
            config,
            identity={
                "vocabulary size": vocab_size,
                "data.num_rows": config.num_rows,
                "data.seq_len": config.seq_len,
                "data.document_len": config.document_len,
            },
            summary={
                "data": "random tokens",
                "tokens": f"{num_tokens:,}",
                "rows per epoch": f"{config.num_rows:,}",
            },
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=False,
            max_epochs=max_epochs,
            pad_to=config.seq_len,  # rows are full: this fills only those that a short last update lacks
            pad_token=0,
        )
