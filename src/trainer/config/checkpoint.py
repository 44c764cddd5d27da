"""Checkpoints, resuming and export."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from contract.settings import Settings
from contract.settings.base import FolderSetting
from contract.store import check_url


class CheckpointConfig(Settings):
    """When the whole state of training is saved, and which steps are kept."""

    interval: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Steps between saves; None saves only the last step (and on a signal)."
    )
    keep_last: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Committed steps kept; older ones are deleted after a newer one is committed. None keeps "
        "all.",
    )
    keep_interval: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Steps divisible by this are kept for ever; None keeps none beyond keep_last.",
    )
    url: str | None = Field(
        default=None,
        description="Folder of an object store for checkpoints, e.g. `s3://bucket/runs`: steps lie in "
        "`<url>/<run_name>/checkpoints`. None is the run folder.",
    )
    async_save: bool = Field(
        default=False,
        description="Write behind the training step; applies with model.offload 'optimizer' or 'full', "
        "whose state is "
        "on the host already.",
    )
    async_buffer_gib: float = Field(
        default=0.0,
        ge=0,
        description="Host memory per rank, in GiB, for copies of optimizer state that the next update "
        "would change "
        "before it is written; 0 lets the update wait.",
    )
    on_failure: Literal["stop", "warn"] = Field(
        default="stop",
        description="A save that fails ends the run, or is logged and counted (the last one always ends it).",
    )
    write_timeout_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="Longest wait for a write or for a peer's share of it, in seconds; then it has failed.",
    )
    grace_seconds: float = Field(
        default=120.0,
        gt=0,
        description="After SIGINT or SIGTERM, seconds to finish the step and save; then the processes are "
        "killed, and the last committed step stands. A pause has no limit.",
    )
    writer_threads: int = Field(default=2, ge=1, description="Threads per rank that write files.")
    checksums: bool = Field(
        default=True,
        description="Record a checksum of every file, so that `ckpt verify` finds silent damage.",
    )

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        if self.url is not None:
            try:
                check_url(self.url)
            except ValueError as error:
                raise ValueError(f"ckpt.url: {error}; remove it to save in the run folder") from None
        if self.keep_interval is not None and self.keep_last is None:
            raise ValueError(
                f"ckpt.keep_interval = {self.keep_interval} exempts steps from pruning, but nothing is "
                f"pruned without "
                "ckpt.keep_last; set ckpt.keep_last or remove ckpt.keep_interval"
            )
        return self


class ResumeConfig(Settings):
    """Which checkpoint a run goes on from, and which parts of it are left out."""

    step: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Step to resume; None is the latest committed."
    )
    dir: FolderSetting | None = Field(
        default=None,
        description="One checkpoint folder of any run (`.../checkpoints/step_40`, or `s3://...` in a store); "
        "None looks in this run.",
    )
    skip_optimizer: bool = Field(default=False, description="Start the optimizer's state afresh.")
    skip_scheduler: bool = Field(
        default=False, description="Start the learning-rate schedule afresh, from its first update."
    )
    skip_progress: bool = Field(default=False, description="Count steps, tokens and samples from 0.")
    skip_data: bool = Field(default=False, description="Start the data from its first row.")

    @model_validator(mode="after")
    def _check(self) -> ResumeConfig:
        if self.dir is not None and "://" in self.dir:
            try:
                check_url(self.dir)
            except ValueError as error:
                raise ValueError(f"resume.dir: {error}") from None
        if self.step is not None and self.dir is not None:
            raise ValueError(
                f"resume.step = {self.step} and resume.dir = {self.dir!r} both name a checkpoint; keep "
                f"one of them"
            )
        return self


class ExportConfig(Settings):
    """Weights in Hugging Face format under `weights/step_N`."""

    interval: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Steps between exports; None exports only after the last step."
    )
    dtype: str = Field(
        default="auto",
        pattern="^(auto|float32|bfloat16|float16)$",
        description="Type of the exported weights: "
        "auto is that of the source weights' config (`float32`, `bfloat16`, `float16` force one).",
    )
    max_shard_size: str = Field(
        default="5GB", pattern=r"^\d+(KB|MB|GB)$", description="Largest file before weights are split."
    )
