"""From a data set to a table of tokenised rows: read, check, render, cut, count; done once and kept in a
cache.

Owns the fate of every row: it is in the table, or counted under one reason in the report, or the run stops
    with one
message that lists the first bad rows. Deterministic; several processes may prepare the same data at the same
time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from contract.errors import DataError
from contract.layout import cache_folder
from trainer.source.conversation import Conversation, RowError, parse_conversation
from trainer.source.reading import HubRows, Row, RowFiles
from trainer.source.render import ConversationRenderer, Rendered
from trainer.source.table import TableWriter, TokenTable, build_in_memory, build_on_disk

_FORMAT = 1
"""Raised when the same input would give another table."""
_BATCH_ROWS = 256
_LISTED_ROWS = 8
_QUIET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Preparation:
    """How rows become samples.

    Attributes:
        seq_len: longest row, in tokens.
        on_bad_row, on_long_row: as in the configuration.
        max_rows: only the first rows of the source; None is all.
        section: section of the configuration, for messages.
    """

    seq_len: int
    on_bad_row: Literal["error", "skip"]
    on_long_row: Literal["skip", "truncate", "error"]
    max_rows: int | None
    section: str = "data"


@dataclass(slots=True)
class Report:
    """Where the rows of a source went.

    Attributes:
        num_read: rows read, blank lines not counted.
        bad: rows that are no conversations, by reason.
        listed: the first of them, with their place.
        num_long: rows longer than seq_len, whatever became of them.
        num_cut_away: those of them that were cut and dropped, since no token with loss was left.
    """

    num_read: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    listed: list[str] = field(default_factory=list)
    num_long: int = 0
    num_cut_away: int = 0

    def add_bad(self, place: str, error: RowError) -> None:
        """Count a bad row."""
        self.bad[error.reason] += 1
        if len(self.listed) < _LISTED_ROWS:
            self.listed.append(f"{place}: {error.detail}")

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        """The inverse of `as_json`."""
        return cls(**{**values, "bad": Counter(values["bad"])})

    def describe(self, num_used: int, how: Preparation) -> str:
        """Rows used and dropped, for the start-up summary."""
        parts = []
        if self.bad:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.bad.most_common())
            parts.append(f"{self.bad.total():,} bad skipped: {reasons}")
        if self.num_long:
            fate = "skipped" if how.on_long_row == "skip" else "cut"
            parts.append(f"{self.num_long:,} longer than {how.seq_len} tokens {fate}")
        if self.num_cut_away:
            parts.append(f"{self.num_cut_away:,} of them dropped: no assistant token left")
        return f"{num_used:,}" + (f" of {self.num_read:,} ({'; '.join(parts)})" if parts else "")


def default_cache_dir() -> Path:
    """Where tokenised rows are kept: `$XDG_CACHE_HOME/tailrace/rows`, by default under `~/.cache`."""
    return cache_folder() / "rows"


def prepare_table(
    source: RowFiles | HubRows,
    renderer: ConversationRenderer,
    how: Preparation,
    *,
    cache_dir: Path | None,
    console: Console | None = None,
) -> TokenTable:
    """Tokenise all rows, or find them tokenised.

    Args:
        source: rows.
        renderer: decides tokens and mask.
        how: what becomes of bad and of long rows.
        cache_dir: folder of tables; None keeps the rows in memory only.
        console: shows the progress once it takes more than a moment; None shows nothing.

    Raises:
        DataError: there are bad rows (`on_bad_row = "error"`), long ones (`on_long_row = "error"`), no rows,
            or none that can be trained on; or the cache cannot be written.
    """

    def fill(writer: TableWriter) -> dict[str, Any]:
        return _Builder(source, renderer, how, writer).run(console).as_json()

    if cache_dir is None:
        return build_in_memory(fill)
    return build_on_disk(cache_dir / _cache_key(source, renderer, how), fill)


def _cache_key(source: RowFiles | HubRows, renderer: ConversationRenderer, how: Preparation) -> str:
    versions = [
        _FORMAT,
        *(importlib.metadata.version(name) for name in ("renderers", "tokenizers", "transformers")),
    ]
    settings = [how.seq_len, how.on_bad_row, how.on_long_row, how.max_rows]
    identity = json.dumps([versions, source.fingerprint(), renderer.digest(), settings])
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


class _Builder:
    """One pass over a source."""

    def __init__(
        self,
        source: RowFiles | HubRows,
        renderer: ConversationRenderer,
        how: Preparation,
        writer: TableWriter,
    ) -> None:
        self._source, self._renderer, self._how, self._writer = source, renderer, how, writer
        self._report = Report()
        self._too_long: list[str] = []

    def run(self, console: Console | None) -> Report:
        """Append every usable row; raises as `prepare_table` does."""
        rows = islice(self._source.rows(), self._how.max_rows)
        for batch in _with_progress(_batches(rows, _BATCH_ROWS), console):
            self._add_batch(batch)
        self._raise_if_unusable()
        return self._report

    def _add_batch(self, rows: list[Row]) -> None:
        first = self._report.num_read
        self._report.num_read += len(rows)
        parsed = [_parse(row) for row in rows]
        conversations = [item for item in parsed if isinstance(item, Conversation)]
        # Bad rows will stop the run: what is left is to find the others, which needs no rendering of the good
        # ones.
        stopping = self._how.on_bad_row == "error" and self._report.bad.total() > 0
        rendered = iter([] if stopping else self._renderer.render(conversations))
        for index, (row, item) in enumerate(zip(rows, parsed, strict=True)):
            result = item if isinstance(item, RowError) or stopping else next(rendered)
            if isinstance(result, RowError):
                self._report.add_bad(row.place, result)
            elif isinstance(result, Rendered):
                self._add_row(row.place, first + index, result)

    def _add_row(self, place: str, sample_id: int, row: Rendered) -> None:
        length, limit = len(row.tokens), self._how.seq_len
        is_long = length > limit
        if is_long:
            self._report.num_long += 1
            if self._how.on_long_row == "error" and len(self._too_long) < _LISTED_ROWS:
                self._too_long.append(f"{place}: {length:,} tokens")
            if self._how.on_long_row != "truncate":
                return
            row = Rendered(row.tokens[:limit], row.trainable[:limit])
        # The first token of a row is predicted from nothing, so loss on it alone is none.
        if row.trainable[1:].any():
            self._writer.append(row, sample_id)
        elif is_long:
            self._report.num_cut_away += 1
        else:
            self._report.add_bad(place, RowError("no token to train on", "no token of the row carries loss"))

    def _raise_if_unusable(self) -> None:
        report, how = self._report, self._how
        what = self._source.describe()
        if report.num_read == 0:
            raise DataError(
                f"{what} holds no rows; set {how.section}.path to data with at least one conversation"
            )
        if report.bad and (how.on_bad_row == "error" or report.bad.total() == report.num_read):
            raise DataError(self._describe_bad(what))
        if report.num_long and how.on_long_row == "error":
            raise DataError(
                f"{report.num_long:,} of {report.num_read:,} rows of {what} are longer than data.seq_len = "
                f"{how.seq_len}:\n{_list(self._too_long, report.num_long)}\n"
                'Raise data.seq_len, or set data.on_long_row to "skip" or "truncate".'
            )
        if len(self._writer) == 0:
            raise DataError(
                f"no row of {what} is left to train on: {report.describe(0, how)}. Raise data.seq_len, or "
                f"set "
                'data.on_long_row to "truncate"'
            )

    def _describe_bad(self, what: str) -> str:
        report, total = self._report, self._report.bad.total()
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in report.bad.most_common())
        every = total == report.num_read
        remedy = (
            f"Set {self._how.section}.path to other data."
            if every
            else 'Correct these rows, or set data.on_bad_row to "skip" to train on the others.'
        )
        return (
            f"{'all' if every else f'{total:,} of'} {report.num_read:,} rows of {what} are not "
            f"conversations to train "
            f"on ({reasons}):\n{_list(report.listed, total)}\n{remedy}"
        )


def _parse(row: Row) -> Conversation | RowError:
    if isinstance(row.value, RowError):
        return row.value
    try:
        return parse_conversation(row.value)
    except RowError as error:
        return error


def _list(lines: list[str], total: int) -> str:
    more = [f"and {total - len(lines):,} more"] if total > len(lines) else []
    return "\n".join(f"  {line}" for line in [*lines, *more])


def _batches(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch


def _with_progress(batches: Iterable[list[Row]], console: Console | None) -> Iterator[list[Row]]:
    if console is None:
        yield from batches
        return
    started, done = time.monotonic(), 0
    columns = (SpinnerColumn(), TextColumn("tokenising: {task.completed:,} rows"), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task("", total=None)
    try:
        for batch in batches:
            yield batch
            done += len(batch)
            progress.update(task, completed=done)
            if not progress.live.is_started and time.monotonic() - started > _QUIET_SECONDS:
                progress.start()
    finally:
        progress.stop()
