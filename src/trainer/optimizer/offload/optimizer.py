"""Optimizer whose weights, gradients and state are float32 in host memory; the device computes only.

The parameters of the model are copies of the weights in the type that the device computes in. Gradients leave
the device as backward produces them, the update is made on the host, and the new weights go back. When which
of this happens is in `pipeline`; here it is tied to the model, the process and the checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.config.optimizer import OptimizerConfig
from trainer.hold import Hold
from trainer.optimizer.groups import GroupSpec
from trainer.optimizer.offload.pipeline import Pipeline
from trainer.optimizer.offload.plan import Chunk, Span, plan_chunks
from trainer.optimizer.offload.slabs import Slabs
from trainer.optimizer.offload.slots import HostState
from trainer.optimizer.offload.update import HostUpdate
from trainer.optimizer.offload.worker import Worker
from trainer.parallel.device import Device
from trainer.parallel.layout import LogicalTensor, ModelParameter, local_part
from trainer.parallel.process import Process

logger = logging.getLogger(__name__)


class FullOffloadOptimizer:
    """Implements `Optimizer`.

    Args:
        parameters: by their name; those that require no gradient are only kept in float32.
        groups: elementwise ones; together they hold each trained parameter once.
        chunk_bytes: most gradient of one chunk, in float32.
        process: this rank; its time limit for peers is also that for the work on the host.
        is_early: whether to update while the last backward still runs. An update that has begun cannot be
            scaled or skipped any more, whatever its gradients turn out to be.
    """

    def __init__(
        self,
        parameters: Mapping[str, ModelParameter],
        groups: Sequence[GroupSpec],
        *,
        chunk_bytes: int,
        process: Process,
        is_early: bool,
    ) -> None:
        self._process = process
        trained = {name: item for name, item in parameters.items() if item.parameter.requires_grad}
        self._frozen = {name: item for name, item in parameters.items() if name not in trained}
        slabs = Slabs(trained, process.device)
        self._masters = slabs.masters
        # Nothing of the state goes to the device, so ordinary memory does.
        self._state = HostState(self._masters, Device(torch.device("cpu")))
        self._update = HostUpdate(groups, slabs, self._state)
        self._worker = Worker("the host's side of full offload", process.timeout.total_seconds())
        self._pipeline = Pipeline(
            _plan(self._masters, groups, max(1, chunk_bytes // torch.float32.itemsize)),
            trained,
            {name: _share(item.parameter, process.world_size) for name, item in trained.items()},
            slabs,
            self._update,
            self._worker,
            process.device,
            is_early=is_early,
        )
        self._hooks = [
            item.parameter.register_post_accumulate_grad_hook(self._hand_over(name))
            for name, item in trained.items()
        ]

    def before_backward(self, lr_factor: float | None) -> None:
        """See `Optimizer`."""
        if lr_factor is not None:
            self._update.options.set_lr_factor(lr_factor)
        self._pipeline.begin_backward(is_last=lr_factor is not None)

    def grad_norm(self) -> float:
        """See `Optimizer`."""
        self._pipeline.finish_gradients()
        return math.sqrt(self._process.all_sum([self._pipeline.sum_of_squares()])[0])

    def step(self, lr_factor: float, grad_scale: float) -> None:
        """See `Optimizer`."""
        self._pipeline.finish_gradients()
        if not self._pipeline.is_updating:
            self._update.options.set_lr_factor(lr_factor)
        self._pipeline.update(grad_scale)
        hold = self._pipeline.hold
        if hold is not None and hold.is_over:
            self._pipeline.hold = None

    def zero_grad(self) -> None:
        """See `Optimizer`."""
        self._pipeline.reset()

    def hold_state_updates(self, hold: Hold) -> None:
        """See `Optimizer`: each chunk waits before its weights and state are changed."""
        self._pipeline.hold = hold

    def weights(self) -> dict[str, LogicalTensor]:
        """See `Optimizer`."""
        frozen = {
            name: ModelParameter(torch.nn.Parameter(item.master, requires_grad=False), item.placement)
            for name, item in self._frozen.items()
            if item.master is not None
        }
        return {
            logical: tensor
            for item in (self._masters | frozen).values()
            for logical, tensor in item.placement.logical(item.parameter, "host").items()
        }

    def weights_loaded(self) -> None:
        """See `Optimizer`."""
        for item in self._frozen.values():
            if item.master is not None:
                local_part(item.parameter).copy_(item.master)
        self._pipeline.refresh()

    def close(self) -> None:
        """See `Optimizer`."""
        for hook in self._hooks:
            hook.remove()
        self._worker.close()

    def tensors(self) -> dict[str, LogicalTensor]:
        """See `Optimizer`."""
        return self._state.tensors()

    def values(self) -> dict[str, Any]:
        """See `Optimizer`."""
        return self._update.options.values()

    def tensors_to_load(self, names: Collection[str]) -> dict[str, LogicalTensor]:
        """See `Optimizer`.

        Raises:
            CheckpointError: the state belongs to a parameter that this model does not have.
        """
        return self._state.allocate(names)

    def loaded(self, values: Mapping[str, Any]) -> None:
        """See `Optimizer`.

        Raises:
            CheckpointError: the state belongs to another optimizer, or its groups are others.
        """
        self._state.check_loaded()
        self._update.options.load(values)

    def _hand_over(self, name: str) -> Any:
        """What happens to a gradient of the parameter `name` once it is reduced over ranks."""

        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self._pipeline.receive(name, local_part(parameter.grad))
            parameter.grad = None

        return hook


def why_late(config: OptimizerConfig) -> str | None:
    """Why the update has to wait for the end of backward; None if it may be early."""
    if config.max_grad_norm is not None:
        return f"optimizer.max_grad_norm = {config.max_grad_norm:g} needs the norm of the whole gradient"
    if config.on_non_finite == "skip":
        return "optimizer.on_non_finite = 'skip' has to see the whole gradient"
    return None


def say_when(process: Process, late_because: str | None) -> None:
    """Tell the user once when updates are made."""
    if not process.is_main:
        return
    if late_because is None:
        logger.info(
            "model.offload = 'full': weights are updated on the host while the last backward of a step still "
            "runs (no clipping, and optimizer.on_non_finite = 'stop')"
        )
    else:
        logger.info(
            "model.offload = 'full': weights are updated on the host after backward, because %s", late_because
        )


def _plan(
    masters: Mapping[str, ModelParameter], groups: Sequence[GroupSpec], chunk_numel: int
) -> list[Chunk]:
    numels = {name: item.parameter.numel() for name, item in masters.items()}
    # What lies on other ranks only: torch is still asked, so that ranks agree on the names of the state.
    empty = [
        Chunk(group.name, tuple(Span(name, 0, 0) for name in group.parameters if not numels[name]))
        for group in groups
    ]
    return [*plan_chunks(numels, groups, chunk_numel), *(chunk for chunk in empty if chunk.spans)]


def _share(parameter: torch.Tensor, world_size: int) -> float:
    """1 / the number of ranks that hold the same shard of `parameter`."""
    num_shards = 1
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard():
                num_shards *= parameter.device_mesh.size(axis)
    return num_shards / world_size
