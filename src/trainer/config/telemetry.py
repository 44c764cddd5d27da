"""Console and log files, where metrics are logged beside the run folder, and profiles."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from contract.sections import LogConfig
from contract.settings import Settings


class TrainLogConfig(LogConfig):
    """Console and log files."""

    interval: int = Field(
        default=1, ge=1, description="Steps between lines on the console; metrics.jsonl has every step."
    )
    live: bool | None = Field(
        default=None,
        description="A live panel in place of a line per step; None where the console is a terminal.",
    )
    peak_tflops: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Peak of one device for MFU, in TFLOP/s; None takes the known value of the GPU, or "
        "measures a matrix product at start.",
    )


class WandbConfig(Settings):
    """Weights & Biases."""

    project: str = Field(default="tailrace", min_length=1, description="Project.")
    entity: str | None = Field(default=None, description="Team or user; None is the account's default.")
    name: str | None = Field(default=None, description="Name of the run; None is run_name.")
    group: str | None = Field(default=None, description="Group of runs; None is none.")
    tags: list[str] = Field(default=[], description="Tags.")
    offline: bool = Field(
        default=False, description="Write to the run folder without network; `wandb sync` uploads later."
    )


class TensorboardConfig(Settings):
    """TensorBoard event files under `tensorboard/` in the run folder."""

    flush_seconds: int = Field(
        default=30, ge=1, description="Longest time until an event is on disk, in seconds."
    )


class ProfilerConfig(Settings):
    """A torch.profiler trace (Chrome format) under `traces/` in the run folder."""

    start_step: int = Field(default=3, ge=1, description="First step that is traced.")
    num_steps: int = Field(default=2, ge=1, description="Steps traced.")
    with_stack: bool = Field(default=False, description="Record Python stacks; larger and slower.")
