"""The device mesh: `dp_replicate` x `dp_shard`."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from contract.errors import ConfigError
from trainer.parallel.process import Process


def build_mesh(process: Process, dp_replicate: int) -> DeviceMesh:
    """One mesh dimension (`dp_shard`), or two with `dp_replicate` > 1 (hybrid sharding).

    Raises:
        ConfigError: `dp_replicate` does not divide the number of ranks.
    """
    world_size = process.world_size
    if world_size % dp_replicate != 0:
        raise ConfigError(
            f"deployment.dp_replicate = {dp_replicate} does not divide the {world_size} ranks of this run"
        )
    if dp_replicate == 1:
        return init_device_mesh(process.device.kind, (world_size,), mesh_dim_names=("dp_shard",))
    shape = (dp_replicate, world_size // dp_replicate)
    return init_device_mesh(process.device.kind, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
