"""FSDP2: every block is a unit, and the root holds what is left (embedding, final norm, head).

Gradients are *summed* over ranks. The loss is divided by the global token count before backward, so no
gradient is rescaled later and every split of rows over ranks gives the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_model(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> FSDPModule:
    """Shard `blocks` and `root` in place; works on the meta device.

    The root stays gathered between forward and backward: the head is needed again at once.
    """
    # Inputs are not cast: positions, loss weights and rotary tables must keep their precision.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    assert isinstance(root, FSDPModule)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # gloo has no pre-multiplied sum, which FSDP would use for a divide factor; a plain sum works
            # everywhere.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return root
