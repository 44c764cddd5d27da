"""FSDP2: every block is a unit, and the root holds what is left (embedding, final norm, head).

Gradients are *summed* over ranks. The loss is divided by the global token count before backward, so no
gradient is rescaled later and every split of rows over ranks gives the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from contract.errors import ConfigError


def shard_model(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    on_dim1: Collection[nn.Parameter] = (),
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> FSDPModule:
    """Shard `blocks` and `root` in place; works on the meta device.

    The root stays gathered between forward and backward: the head is needed again at once.

    Args:
        on_dim1: parameters that are sharded on dim 1, so that every rank holds a part of each of their rows;
            all others are sharded on dim 0.

    Raises:
        ConfigError: the size of a dim 1 is no multiple of the number of shards.
    """
    # Inputs are not cast: positions, loss weights and rotary tables must keep their precision.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    shared: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "shard_placement_fn": _placement_function(on_dim1, mesh["dp_shard"].size()),
    }
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **shared)
    fully_shard(root, reshard_after_forward=False, **shared)
    assert isinstance(root, FSDPModule)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # gloo has no pre-multiplied sum, which FSDP would use for a divide factor; a plain sum works
            # everywhere.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return root


def _placement_function(
    on_dim1: Collection[nn.Parameter], num_shards: int
) -> Callable[[nn.Parameter], Shard | None]:
    for parameter in on_dim1:
        if parameter.shape[1] % num_shards:
            raise ConfigError(
                f"model.shard_fused_on_dim1 = true cuts the {parameter.shape[1]} input features of a fused "
                f"projection into {num_shards} shards, which does not divide; set it to false, or choose "
                f"deployment.num_processes and deployment.dp_replicate so that the shards divide "
                f"{parameter.shape[1]}"
            )
    chosen = {id(parameter) for parameter in on_dim1}
    return lambda parameter: Shard(1) if id(parameter) in chosen else None
