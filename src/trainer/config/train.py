"""What the configuration of every kind of training has in common, and what its sections refuse together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from contract.sections import RunName
from contract.settings import Settings
from contract.settings.base import PathSetting
from trainer.config.checkpoint import CheckpointConfig, ExportConfig, ResumeConfig
from trainer.config.model import DeploymentConfig, ModelConfig, OffloadConfig
from trainer.config.optimizer import AdamWConfig, ConstantScheduleConfig, OptimizerConfig, ScheduleConfig
from trainer.config.telemetry import ProfilerConfig, TensorboardConfig, TrainLogConfig, WandbConfig

_GRACE_SECONDS_WITHOUT_SAVE = 10.0
"""Time to finish a step and close, where there is nothing to save."""


class TrainConfig(Settings):
    """A run that trains a causal language model."""

    output_dir: PathSetting = Field(default=Path("outputs"), description="Folder that holds run folders.")
    run_name: RunName = Field(description="Name of the run's folder in output_dir.")
    clean: bool = Field(
        default=False, description="Delete a run that the folder already holds, and start anew."
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**62,
        description="Decides random weights, the order of data, dropout and sampling.",
    )
    max_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Updates in the run, counted from step 0; None leaves the end to max_epochs.",
    )
    max_minutes: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Wall-clock limit of one launch, from the start of its processes: the run pauses after "
        "the step in which it passes, however long the save takes then. None has no limit.",
    )

    model: ModelConfig = Field(description="The model.")
    offload: OffloadConfig = Field(default=OffloadConfig(), description="Offloaded state, see model.offload.")
    optimizer: OptimizerConfig = Field(default=AdamWConfig(), description="Optimizer.")
    schedule: ScheduleConfig = Field(default=ConstantScheduleConfig(), description="Learning-rate schedule.")
    deployment: DeploymentConfig = Field(default=DeploymentConfig(), description="Processes and mesh.")
    ckpt: CheckpointConfig | None = Field(
        default=CheckpointConfig(), description="Checkpoints; `--no-ckpt` saves none, also on a signal."
    )
    resume: ResumeConfig | None = Field(
        default=None, description="Go on from a checkpoint; None starts a new run."
    )
    export: ExportConfig | None = Field(
        default=ExportConfig(), description="Hugging Face export; `--no-export` writes none."
    )
    log: TrainLogConfig = Field(default=TrainLogConfig(), description="Console and log files.")
    wandb: WandbConfig | None = Field(default=None, description="Weights & Biases; None is off.")
    tensorboard: TensorboardConfig | None = Field(default=None, description="TensorBoard; None is off.")
    profiler: ProfilerConfig | None = Field(default=None, description="Profiler trace; None is off.")

    @property
    def checkpoint_url(self) -> str | None:
        """`ckpt.url`, or None where checkpoints lie in the run folder."""
        return self.ckpt.url if self.ckpt is not None else None

    @property
    def grace_seconds(self) -> float:
        """Seconds from a signal to the kill of a process that has not ended."""
        return self.ckpt.grace_seconds if self.ckpt is not None else _GRACE_SECONDS_WITHOUT_SAVE

    @model_validator(mode="after")
    def _check_schedule(self) -> TrainConfig:
        decay_steps = getattr(self.schedule, "decay_steps", None) or 0
        if self.max_steps is not None and self.schedule.warmup_steps + decay_steps > self.max_steps:
            raise ValueError(
                f"schedule.warmup_steps = {self.schedule.warmup_steps} and schedule.decay_steps = "
                f"{decay_steps} do not "
                f"fit into max_steps = {self.max_steps}; lower them"
            )
        return self

    @model_validator(mode="after")
    def _check_mesh(self) -> TrainConfig:
        processes, replicate = self.deployment.num_processes, self.deployment.dp_replicate
        if processes is not None and processes % replicate != 0:
            raise ValueError(
                f"deployment.dp_replicate = {replicate} does not divide deployment.num_processes = "
                f"{processes}"
            )
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> TrainConfig:
        if self.model.offload == "full" and self.optimizer.type == "muon":
            raise ValueError(
                "model.offload = 'full' updates weights on the host, piece by piece, but optimizer.type = "
                "'muon' multiplies whole matrices, for which the host is too slow; set model.offload = "
                "'optimizer', or optimizer.type to 'adamw', 'sgd' or 'signsgd'"
            )
        return self

    @model_validator(mode="after")
    def _check_acts(self) -> TrainConfig:
        if self.resume is not None and self.clean:
            raise ValueError("clean deletes the run that resume would go on from; remove one of them")
        return self
