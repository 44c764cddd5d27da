"""signSGD (Bernstein et al. 2018, https://arxiv.org/abs/1802.04434), without state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class SignSGD(torch.optim.Optimizer):
    """p <- p * (1 - lr * weight_decay) - lr * sign(grad)."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update; `closure` is evaluated first if given, as torch's optimizers do."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        return loss
