"""What the loop is fed with: opens the source of each kind of training, and what is said of it.

Which kind a run is, is decided in `build`.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.console import Console as RichConsole

from contract.channel.build import open_receiver
from contract.layout import RunFolder
from contract.policy import Origin
from contract.sections import ChannelConfig, FilesystemChannelConfig
from telemetry.log import terminal
from trainer.config import RLTrainConfig, SFTConfig
from trainer.config.data import ChatDataConfig
from trainer.parallel.process import Process
from trainer.source.base import Source
from trainer.source.dataset import ChatSource
from trainer.source.fake import FakeSource
from trainer.source.prepare import default_cache_dir
from trainer.source.stream import Rows, StreamSource
from trainer.source.validation import ValidationRows
from trainer.state import TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Source, covariant=True)


@dataclass(frozen=True, slots=True)
class Feed(Generic[S]):
    """A source, and what the rest of the run needs to know of its batches.

    Attributes:
        seq_len: most tokens of a row.
        seq_len_key: the setting that says so.
        rows_at_a_time: most rows of a micro-batch.
        rows: lines for the start-up summary: title and value.
        validation: held-out rows, if there are any.
    """

    source: S
    seq_len: int
    seq_len_key: str
    rows_at_a_time: int
    rows: dict[str, str] = field(default_factory=dict)
    validation: ValidationRows | None = None


def open_dataset(config: SFTConfig, process: Process, tokenizer: PreTrainedTokenizerBase) -> Feed[Source]:
    """The data of an SFT run.

    Raises:
        DataError: it is missing or leaves nothing to train on.
        ConfigError: the batch cannot be dealt evenly to the ranks.
    """
    place: dict[str, Any] = {"rank": process.rank, "world_size": process.world_size}
    data, validation = config.data, None
    if isinstance(data, ChatDataConfig):
        progress: RichConsole | None = terminal() if process.is_main else None
        shared = {
            **place,
            "pad_rows": config.model.compile,
            "cache_dir": default_cache_dir(),
            "console": progress,
        }
        source: Source = ChatSource(data, tokenizer, seed=config.seed, max_epochs=config.max_epochs, **shared)
        if config.validation is not None:
            validation = ValidationRows(config.validation, data, tokenizer, **shared)
    else:
        source = FakeSource(
            data, vocab_size=len(tokenizer), seed=config.seed, max_epochs=config.max_epochs, **place
        )
    per_rank = data.batch_size // process.world_size
    at_a_time = min(data.micro_batch_size, per_rank)
    if data.micro_batch_size > per_rank and process.is_main:
        logger.warning(
            "data.micro_batch_size = %d is more than the %d rows that each rank has per update; %d are used",
            data.micro_batch_size,
            per_rank,
            per_rank,
        )
    batch = f"{data.batch_size} rows of {data.seq_len} tokens; {per_rank} per rank, {at_a_time} at a time"
    rows = {"batch": batch, **source.summary(), **(validation.summary() if validation else {})}
    return Feed(source, data.seq_len, "data.seq_len", at_a_time, rows, validation)


def open_stream(
    config: RLTrainConfig,
    process: Process,
    folder: RunFolder,
    state: TrainState,
    origin: Origin,
    stack: ExitStack,
) -> Feed[StreamSource]:
    """The rollouts of an RL run.

    Args:
        state: of the run, whose step is the position in the stream.
        origin: this run and this start of its trainer, on rank 0.
        stack: takes what must be closed.

    Raises:
        ChannelError: the channel cannot be opened.
    """
    receiver = open_receiver(config.channel, folder, origin.trainer) if process.is_main else None
    if receiver is not None:
        stack.callback(receiver.close)
    through = _describe(config.channel, folder)
    source = StreamSource(
        receiver,
        process,
        state,
        Rows(config.seq_len, config.micro_batch_size, pad=config.model.compile),
        run_id=origin.run_id,
        timeout_seconds=config.batch_timeout_seconds,
        place=f"{through}; see the orchestrator's log in {folder.logs / 'latest'}",
    )
    rows = {
        "batch": f"rows of at most {config.seq_len} tokens, {config.micro_batch_size} at a time on a rank",
        "rollouts": through,
        "weights": f"{config.publish.type} to {', '.join(config.servers) or 'no policy server'}",
        "loss": config.loss.type,
    }
    return Feed(source, config.seq_len, "seq_len", config.micro_batch_size, rows)


def _describe(channel: ChannelConfig, folder: RunFolder) -> str:
    if isinstance(channel, FilesystemChannelConfig):
        return f"through the folder {folder.channel}"
    return f"through ZMQ at {channel.host}:{channel.port}"
