"""Weights broadcast to the policy servers, bucket by bucket, without a copy on disk.

Rank 0 and the servers form a group of their own, which is kept from version to version. The store in which
they meet and the sender's connections listen on `publish.host` only.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from contract.broadcast import (
    Backend,
    Bucket,
    Go,
    Group,
    Here,
    can_use_nccl,
    go_key,
    here_key,
    name_device,
    reason_of,
)
from contract.errors import ConfigError, PublishError
from contract.policy import BroadcastUpdate, Origin
from contract.sections import CollectivePublishConfig
from trainer.parallel.device import Device
from trainer.publish.client import Calls, PolicyServers
from trainer.publish.gather import GatherPlan

_POLL_SECONDS = 0.005
_EARLIER = 0.1
_PATIENCE_SECONDS = 2.0
"""A server that has left the group says why over HTTP a moment later."""


class BroadcastSink:
    """See `trainer.publish.bucketed.Sink`.

    Args:
        origin: whose weights these are; no other sender may ever have the same.

    Raises:
        ConfigError: `publish.host` is no address of this machine.
    """

    def __init__(
        self,
        config: CollectivePublishConfig,
        servers: PolicyServers,
        origin: Origin,
        device: Device,
        bucket_bytes: int,
    ) -> None:
        self._config = config
        self._servers = servers
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._origin = origin
        listener, self._address = _listen(config.host)
        self._port: int = listener.getsockname()[1]
        # The store closes the descriptor. It would listen on all addresses if it made one itself.
        self._store: dist.TCPStore | None = dist.TCPStore(
            self._address,
            self._port,
            is_master=True,
            timeout=timedelta(seconds=config.timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._group: Group | None = None
        self._num_groups = 0
        self._number = 0
        self._used_keys: list[str] = []
        self._have_answered = False
        self._is_given_up = threading.Event()
        self._deadline = 0.0
        self._calls: Calls | None = None

    def begin(self, version: int, plan: GatherPlan) -> None:
        """See `Sink`."""
        self._is_given_up.clear()
        self._deadline = time.monotonic() + self._config.timeout_seconds
        if not self._have_answered:
            self._servers.wait_until_up(self._deadline)
            self._have_answered = True
        self._number += 1
        self._used_keys += [go_key(self._number), *self._here_keys()]
        updates = [
            BroadcastUpdate(
                version=version,
                tensors=plan.tensors,
                backend=self._config.backend,
                host=self._config.host,
                port=self._port,
                origin=self._origin,
                number=self._number,
                rank=rank,
                world_size=len(self._servers) + 1,
                bucket_bytes=self._bucket_bytes,
                timeout_seconds=self._config.timeout_seconds,
            )
            for rank in range(1, len(self._servers) + 1)
        ]
        self._calls = self._servers.update(updates, self._deadline)
        try:
            self._meet(self._wait_for_receivers())
        except PublishError:
            self._refuse()
            raise

    def put(self, index: int, bucket: Bucket, flat: torch.Tensor) -> None:
        """See `Sink`."""
        assert self._group is not None
        flat = flat.to(self._device.torch_device if self._group.backend == "nccl" else "cpu")
        try:
            self._group.broadcast(flat, self._deadline - time.monotonic(), self._check)
        except PublishError:
            self._drop_group()
            raise
        except RuntimeError as error:
            raise self._lost(f"bucket {index + 1}", error) from error

    def finish(self) -> None:
        """See `Sink`."""
        assert self._calls is not None and self._store is not None
        self._calls.finish()
        # Every server has answered, so none waits for a key of this broadcast, nor of one before it that
        # failed. The store would hold them to the end of the run.
        for key in self._used_keys:
            self._store.delete_key(key)
        self._used_keys.clear()

    def abort(self) -> None:
        """See `Sink`."""
        self._is_given_up.set()
        if self._calls is not None:
            self._calls.cancel()

    def close(self) -> None:
        """See `Sink`."""
        self._drop_group()
        self._refuse()
        self._store = None
        self._servers.close()

    def _wait_for_receivers(self) -> list[Here]:
        """What each server says when it has come to the store."""
        assert self._store is not None
        keys = self._here_keys()
        # Before the requests run out of time, for this error says more.
        deadline = self._deadline - _EARLIER * self._config.timeout_seconds
        while not self._store.check(keys):
            self._check()
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise PublishError(
                    f"policy servers {', '.join(map(str, missing))} of `servers` (from 0) did not come to "
                    f"{self._config.host}:{self._port} within publish.timeout_seconds; they are stuck (see "
                    f"logs/latest/inference.log), or publish.host must be another address of the "
                    f"trainer's machine, which they can reach"
                )
            time.sleep(_POLL_SECONDS)
        return [msgspec.json.decode(self._store.get(key), type=Here) for key in keys]

    def _check(self) -> None:
        """Raises `PublishError` where there is nothing to wait for."""
        assert self._calls is not None
        self._calls.raise_failed()
        if self._is_given_up.is_set():
            raise PublishError("given up")

    def _here_keys(self) -> list[str]:
        return [here_key(self._number, rank) for rank in range(1, len(self._servers) + 1)]

    def _meet(self, receivers: list[Here]) -> None:
        """Take the kept group, or form a new one where any end has none."""
        assert self._store is not None
        backend = self._choose_backend([receiver.device for receiver in receivers])
        is_kept = self._group is not None and {r.kept for r in receivers} == {self._group.number}
        if not is_kept or self._group is None or self._group.backend != backend:
            self._drop_group()
            self._num_groups += 1
        self._store.set(go_key(self._number), msgspec.json.encode(Go(self._num_groups, backend)).decode())
        if self._group is not None:
            return
        try:
            self._group = Group(
                self._store,
                self._num_groups,
                backend,
                0,
                len(self._servers) + 1,
                address=self._address,
                device=self._device.torch_device,
                timeout_seconds=max(0.1, self._deadline - time.monotonic()),
                check=self._check,
            )
        except PublishError:
            raise
        except RuntimeError as error:
            raise self._lost("the group", error) from error

    def _choose_backend(self, devices: list[str]) -> Backend:
        joined = [name_device(self._device.torch_device), *devices]
        can_nccl = can_use_nccl(joined)
        if self._config.backend == "nccl" and not can_nccl:
            raise PublishError(
                f"publish.backend = 'nccl' needs a GPU of its own for the trainer's first rank and for each "
                f"policy server; they compute on {', '.join(joined)}; set publish.backend = 'gloo'"
            )
        return "gloo" if self._config.backend == "gloo" or not can_nccl else "nccl"

    def _refuse(self) -> None:
        """Send receivers that still wait for the answer away."""
        is_open = go_key(self._number) in self._used_keys
        if is_open and self._store is not None and not self._store.check([go_key(self._number)]):
            self._store.set(go_key(self._number), msgspec.json.encode(Go(0, "gloo")).decode())

    def _lost(self, what: str, error: RuntimeError) -> PublishError:
        """The error for a broken broadcast: the server's own words, if it has any."""
        self._drop_group()
        assert self._calls is not None
        try:
            self._calls.raise_failed(_PATIENCE_SECONDS)
        except PublishError as told:
            return told
        return PublishError(
            f"a policy server left or did not keep up ({what} of the broadcast: {reason_of(error)}); it "
            f"stays on the version before; its log (logs/latest/inference.log) says more; raise "
            f"publish.timeout_seconds if it was slow"
        )

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


def _listen(host: str) -> tuple[socket.socket, str]:
    """A socket on a free port of `host`, and its numeric address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server((address[0], 0), family=family), str(address[0])
    except OSError as error:
        raise ConfigError(
            f"publish.host = {host!r} is no address of this machine ({error.strerror}); set it to one that "
            f"the policy servers can reach, or to '127.0.0.1' if they are on this machine"
        ) from error
