"""How the orchestrator knows that the weights which draw are those of its run's trainer.

A trainer publishes the version that it begins with before it asks for its first batch, and goes by one id,
new at every start, on the channel and at the servers. So sampling begins once a trainer asks, if the servers
have weights of that id in the version to go on from: whatever an earlier attempt or another run has left
there is told apart, whichever part was started again. From then on draws name the run; a trainer that is
started again meanwhile may go on from the version that is served, and from no earlier one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from contract.channel.base import Sender
from contract.errors import ConfigError, PolicyServerError, PublishError
from contract.policy import Origin, VersionInfo

_INTERVAL_SECONDS = 0.02


class VersionClient(Protocol):
    """What is asked of `PolicyClient`."""

    async def weights(self) -> Mapping[str, VersionInfo]:
        """What draws now, by the address of each server."""
        ...

    async def wait_for_version(self, at_least: int, timeout_seconds: float) -> int:
        """The version served, as soon as it is `at_least`, or after the time."""
        ...


async def wait_for_trainer(sender: Sender) -> str:
    """The id of the trainer that asks for batches; it has published the version that it begins with."""
    while (trainer := await sender.receiver()) is None:
        await asyncio.sleep(_INTERVAL_SECONDS)
    return trainer


def check_servers(servers: Mapping[str, VersionInfo], origin: Origin, version: int, seq_len: int) -> None:
    """
    Args:
        servers: what draws at each address.
        origin: the trainer that asks for batches.
        version: that the orchestrator goes on from.
        seq_len: longest sample, prompt included, in tokens.

    Raises:
        PolicyServerError: a server has not this trainer's weights.
        PublishError: they are of another version.
        ConfigError: a server draws no sequences as long as samples may be.
    """
    for address, info in servers.items():
        if info.origin != origin:
            raise PolicyServerError(
                f"the policy server {address} does not have the weights of this run's trainer, which has "
                f"published version {version}, but version {info.version} of run "
                f"{info.origin.run_id or 'none'}; `servers` must be the same for trainer and orchestrator, "
                f"and no other run may use them"
            )
        if info.version != version:
            raise PublishError(
                f"the trainer is at version {info.version}, and the orchestrator goes on from version "
                f"{version}: start both from one step (`rl --resume`; or `--resume.step N` for the trainer "
                f"and `--resume-dir RUN/checkpoints/step_N` for the orchestrator)"
            )
        if info.max_len is not None and info.max_len < seq_len:
            raise ConfigError(
                f"seq_len = {seq_len}, but the policy server {address} has max_len = {info.max_len}; lower "
                f"seq_len, or start the server with more"
            )
