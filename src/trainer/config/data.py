"""What is trained on: files or Hub data sets of conversations, or synthetic rows for benchmarks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from contract.settings import Settings


class BatchConfig(Settings):
    """The size of one update; shared by every kind of data."""

    seq_len: int = Field(default=1024, ge=8, description="Longest row, in tokens.")
    batch_size: int = Field(
        default=8,
        ge=1,
        description="Rows per update, over all ranks; does not depend on the number of processes.",
    )
    micro_batch_size: int = Field(
        default=1,
        ge=1,
        description="Rows per forward and backward on one rank; changes memory and speed, never the result.",
    )


class ChatSourceConfig(Settings):
    """One file, folder or Hub data set of conversations."""

    path: str = Field(
        min_length=1,
        description="Local `.jsonl`/`.json`/`.parquet` file, glob or folder, or a Hub data set id. Rows hold "
        "`messages` (a list of role/content) or `prompt` + `completion` (then loss is on the completion "
        "only); `tools` "
        "is optional.",
    )
    split: str = Field(
        default="train", description="Split of a Hub data set; ignored is an error for local files."
    )
    subset: str | None = Field(
        default=None, description="Configuration name of a Hub data set; None is its default."
    )
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of a Hub data set; None is the default."
    )

    @property
    def is_local(self) -> bool:
        """Whether `path` names local files (by its ending or its first character) and not a Hub data set."""
        return self.path.endswith((".jsonl", ".json", ".parquet")) or self.path.startswith(("/", ".", "~"))

    @model_validator(mode="after")
    def _check(self) -> ChatSourceConfig:
        if self.is_local:
            for name, default in (("split", "train"), ("subset", None), ("revision", None)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"`{name}` is for Hub data sets, but `path` = {self.path!r} is local; remove it"
                    )
        return self


class ChatDataConfig(ChatSourceConfig, BatchConfig):
    """Conversations, rendered once with the chat template; loss on what the assistant says."""

    type: Literal["chat"] = "chat"
    packing: bool = Field(
        default=True, description="Pack several conversations into a row; attention never crosses them."
    )
    shuffle: bool = Field(
        default=True, description="New seeded order of the rows in every epoch; off keeps the file order."
    )
    loss_on: Literal["all_assistant", "last_assistant"] = Field(
        default="all_assistant", description="Which assistant turns carry loss."
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="A row that is not a conversation (bad JSON, no messages, no assistant turn) stops the "
        "run before training, or is skipped and counted by reason.",
    )
    on_long_row: Literal["skip", "truncate", "error"] = Field(
        default="skip",
        description="A conversation longer than seq_len is skipped, cut at seq_len (no end token is added), "
        "or stops the run; counted either way.",
    )
    max_rows: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Use only the first rows; None is all."
    )


class FakeDataConfig(BatchConfig):
    """Random tokens, for benchmarks: every row is full and every token is trained."""

    type: Literal["fake"] = "fake"
    num_rows: int = Field(default=1024, ge=1, description="Rows per epoch.")
    document_len: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="Tokens per document inside a row; None is one document per row."
    )

    @model_validator(mode="after")
    def _check(self) -> FakeDataConfig:
        if self.document_len is not None and self.document_len > self.seq_len:
            raise ValueError(
                f"data.document_len = {self.document_len} is longer than data.seq_len = {self.seq_len}; "
                f"lower it"
            )
        return self


DataConfig = Annotated[ChatDataConfig | FakeDataConfig, Field(discriminator="type")]


class ValidationConfig(ChatSourceConfig):
    """Loss on held-out conversations, computed without changing anything of the run."""

    interval: int = Field(
        default=100, ge=1, description="Steps between validations; the last step always validates."
    )
    max_rows: Annotated[int, Field(ge=1)] | None = Field(default=256, description="Rows used; None is all.")
    at_start: bool = Field(default=True, description="Also validate before the first step.")


class SampleConfig(Settings):
    """Text generated from the model before the first and after the last step."""

    prompts: list[str] = Field(min_length=1, description="User messages, each answered once, greedily.")
    system: str | None = Field(
        default=None, description="System message before each prompt; None leaves it to the template."
    )
    max_new_tokens: int = Field(default=64, ge=1, description="Longest answer, in tokens.")
