"""The configuration of an SFT run: every section, and what they refuse together."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from contract.sections import RunName
from trainer.config.data import ChatDataConfig, DataConfig, SampleConfig, ValidationConfig
from trainer.config.train import TrainConfig


class SFTConfig(TrainConfig):
    """Supervised fine-tuning of a causal language model."""

    run_name: RunName = Field(default="sft", description="Name of the run's folder in output_dir.")
    max_epochs: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Passes over the data; None leaves the end to max_steps."
    )
    data: DataConfig = Field(description="Training data.")
    validation: ValidationConfig | None = Field(
        default=None, description="Held-out loss; None does not validate."
    )
    sample: SampleConfig | None = Field(
        default=None, description="Samples before and after training; None prints none."
    )

    @model_validator(mode="after")
    def _check_end(self) -> SFTConfig:
        if self.max_steps is None and self.max_epochs is None:
            raise ValueError("nothing ends this run: set max_steps or max_epochs")
        if self.max_steps is not None and self.max_epochs is not None:
            raise ValueError(
                f"max_steps = {self.max_steps} and max_epochs = {self.max_epochs} both end the run; keep one "
                f"of them"
            )
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> SFTConfig:
        processes = self.deployment.num_processes
        if processes is not None and self.data.batch_size % processes != 0:
            raise ValueError(
                f"data.batch_size = {self.data.batch_size} cannot be dealt evenly to "
                f"deployment.num_processes = "
                f"{processes}; choose a multiple"
            )
        if self.validation is not None and not isinstance(self.data, ChatDataConfig):
            raise ValueError("validation reads conversations, but data.type is 'fake'; remove validation")
        if self.data.batch_size < self.data.micro_batch_size:
            raise ValueError(
                f"data.micro_batch_size = {self.data.micro_batch_size} is larger than data.batch_size = "
                f"{self.data.batch_size}; lower it"
            )
        return self
