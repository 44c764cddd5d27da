"""The configuration of the trainer's share of an RL run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from contract.sections import (
    ChannelConfig,
    FilesystemChannelConfig,
    FilesystemPublishConfig,
    PublishConfig,
    RunName,
)
from contract.settings import Settings
from trainer.config.train import TrainConfig


class TrustRegionLossConfig(Settings):
    """Policy gradient with the importance ratio of each token, within a trust region."""

    type: Literal["trust_region"] = "trust_region"
    ratio_min: float = Field(
        default=0.125,
        gt=0,
        lt=1,
        description="A token that the new policy makes less likely than this times what the sampler gave it "
        "carries no policy gradient.",
    )
    ratio_max: float = Field(
        default=8.0, gt=1, description="The same for a token that it makes this many times as likely."
    )
    log_ratio_penalty: float = Field(
        default=1e-3,
        ge=0,
        description="Weight of the squared log-ratio, which pulls every token back to the sampler; 0 is off.",
    )


class ClippedLossConfig(Settings):
    """Clipped surrogate of PPO and GRPO."""

    type: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="Ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(default=0.2, gt=0, description="Ratios above 1 + clip_high are clipped.")


class CustomLossConfig(Settings):
    """A function of yours; see docs/rl.md for its arguments."""

    type: Literal["custom"] = "custom"
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$", description="Import path, `package.module:function`.")


LossConfig = Annotated[
    TrustRegionLossConfig | ClippedLossConfig | CustomLossConfig, Field(discriminator="type")
]


class RLTrainConfig(TrainConfig):
    """Reinforcement learning: what the trainer needs to know."""

    run_name: RunName = Field(default="rl", description="Name of the run's folder in output_dir.")
    max_steps: Annotated[int, Field(ge=1)] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        description="Updates in the run, counted from step 0.",
    )
    seq_len: int = Field(
        default=1024,
        ge=8,
        description="Longest sample, prompt included, in tokens; also the length of a row.",
    )
    micro_batch_size: int = Field(
        default=1,
        ge=1,
        description="Rows per forward and backward on one rank; changes memory and speed, never the result.",
    )
    loss: LossConfig = Field(default=TrustRegionLossConfig(), description="Loss of sampled tokens.")
    channel: ChannelConfig = Field(
        default=FilesystemChannelConfig(), description="The way of batches to the trainer."
    )
    publish: PublishConfig = Field(
        default=FilesystemPublishConfig(), description="The way of weights to the policy servers."
    )
    batch_timeout_seconds: float = Field(
        default=1800.0, gt=0, description="Longest wait for a batch of rollouts, in seconds."
    )
    servers: list[str] = Field(
        default=[],
        description="Policy servers, as `http://host:port`; `rl` fills in the one that it starts.",
    )
    server_key: str | None = Field(
        default=None, description="API key of the policy servers; None sends none."
    )
