"""The publisher that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from contract.errors import ConfigError
from contract.layout import RunFolder
from contract.policy import Origin
from contract.sections import CollectivePublishConfig, FilesystemPublishConfig
from trainer.config.rl import RLTrainConfig
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process
from trainer.publish.base import Publisher
from trainer.publish.bucketed import BucketPublisher, Sink
from trainer.publish.client import PolicyServers
from trainer.publish.collective import BroadcastSink
from trainer.publish.filesystem import SHARD_BYTES, FolderSink


def build_publisher(
    config: RLTrainConfig,
    process: Process,
    folder: RunFolder,
    weights: Callable[[], Mapping[str, LogicalTensor]],
    *,
    origin: Origin,
    dtype: torch.dtype,
) -> Publisher:
    """The publisher of an RL run; every rank has one.

    Args:
        weights: this rank's share of all weights by the name of their parameter, as they are now.
        origin: this run and this start of its trainer, on rank 0.
        dtype: in which floating-point weights travel.

    Raises:
        ConfigError: there is no server, or `publish.host` is no address of this machine.
    """
    if not config.servers:
        raise ConfigError(
            "servers is empty: nobody would get the weights; set it to the policy servers, as "
            "`http://host:port` (`rl` fills in the one that it starts)"
        )
    bucket_bytes = _bucket_bytes(config)
    sink = _build_sink(config, process, folder, origin, bucket_bytes) if process.is_main else None
    return BucketPublisher(process, weights, dtype, bucket_bytes, sink)


def _bucket_bytes(config: RLTrainConfig) -> int:
    publish = config.publish
    if isinstance(publish, CollectivePublishConfig):
        return max(1, int(publish.bucket_mib * 2**20))
    return SHARD_BYTES


def _build_sink(
    config: RLTrainConfig, process: Process, folder: RunFolder, origin: Origin, bucket_bytes: int
) -> Sink:
    servers = PolicyServers(config.servers, config.server_key)
    try:
        match config.publish:
            case FilesystemPublishConfig():
                return FolderSink(config.publish, folder.broadcasts, servers, origin)
            case CollectivePublishConfig():
                return BroadcastSink(config.publish, servers, origin, process.device, bucket_bytes)
    except BaseException:
        servers.close()
        raise
