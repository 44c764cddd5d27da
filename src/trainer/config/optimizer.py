"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from contract.settings import Settings


class OptimizerBase(Settings):
    """What every optimizer has."""

    lr: float = Field(default=1e-5, ge=0, description="Peak learning rate.")
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        description="Weight decay, decoupled from the gradient (but for sgd); norms, biases and other 1-D "
        "weights never decay.",
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=1.0, description="Clip the global L2 norm of the gradient to this; None does not clip."
    )
    on_non_finite: Literal["skip", "stop"] = Field(
        default="skip",
        description="A loss or gradient that is not finite skips the update on every rank and is counted, "
        "or ends the run.",
    )


class AdamWConfig(OptimizerBase):
    """AdamW (Loshchilov & Hutter 2019), torch's fused kernel."""

    type: Literal["adamw"] = "adamw"
    betas: list[float] = Field(
        default=[0.9, 0.95], min_length=2, max_length=2, description="Decay of both moments, in [0, 1)."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")

    @model_validator(mode="after")
    def _check(self) -> AdamWConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas = {self.betas}: both must lie in [0, 1)")
        return self


class SGDConfig(OptimizerBase):
    """Stochastic gradient descent with momentum, torch's own; here weight decay is added to the gradient
    (L2).
    """

    type: Literal["sgd"] = "sgd"
    momentum: float = Field(
        default=0.0, ge=0, lt=1, description="Decay of the momentum buffer; 0 keeps no state."
    )
    nesterov: bool = Field(default=False, description="Nesterov momentum; needs momentum > 0.")

    @model_validator(mode="after")
    def _check(self) -> SGDConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("optimizer.nesterov needs optimizer.momentum > 0")
        return self


class SignSGDConfig(OptimizerBase):
    """signSGD (Bernstein et al. 2018): the update is the sign of the gradient; keeps no state."""

    type: Literal["signsgd"] = "signsgd"


class MuonConfig(OptimizerBase):
    """Muon (Jordan et al. 2024), torch's own, for the matrices of the blocks; AdamW for everything else."""

    type: Literal["muon"] = "muon"
    momentum: float = Field(default=0.95, ge=0, lt=1, description="Decay of the momentum buffer.")
    nesterov: bool = Field(default=True, description="Nesterov momentum.")
    adjust_lr: Literal["original", "match_rms_adamw"] = Field(
        default="match_rms_adamw",
        description="Scale of a matrix update; match_rms_adamw lets one lr serve both parts.",
    )
    betas: list[float] = Field(
        default=[0.9, 0.95], min_length=2, max_length=2, description="AdamW part: decay of both moments."
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW part: added to the root of the second moment.")

    @model_validator(mode="after")
    def _check(self) -> MuonConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas = {self.betas}: both must lie in [0, 1)")
        return self


OptimizerConfig = Annotated[AdamWConfig | SGDConfig | SignSGDConfig | MuonConfig, Field(discriminator="type")]


class ScheduleBase(Settings):
    """What every schedule has. Warm-up rises linearly from 0: update n of n_w uses lr * n / n_w."""

    warmup_steps: int = Field(default=0, ge=0, description="Updates of linear warm-up.")


class ConstantScheduleConfig(ScheduleBase):
    """Warm-up, then constant."""

    type: Literal["constant"] = "constant"


class LinearScheduleConfig(ScheduleBase):
    """Warm-up, stable, then linear decay (WSD); without decay_steps the decay begins after warm-up."""

    type: Literal["linear"] = "linear"
    decay_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Length of the decay at the end of the run, in updates; None is all after warm-up.",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Learning rate at the end, as a share of the peak."
    )


class CosineScheduleConfig(ScheduleBase):
    """Warm-up, then half a cosine to the end of the run (Loshchilov & Hutter 2017)."""

    type: Literal["cosine"] = "cosine"
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Learning rate at the end, as a share of the peak."
    )


ScheduleConfig = Annotated[
    ConstantScheduleConfig | LinearScheduleConfig | CosineScheduleConfig, Field(discriminator="type")
]
