"""New weights by broadcast from the trainer.

Owns the group with the trainer and the other servers. It is kept from update to update, and given up when an
update is not read to its end: the trainer notices at once then. A trainer that was started again is another
sender and gets a new group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from contract.broadcast import (
    DTYPE_BYTES,
    Go,
    Group,
    Here,
    cut,
    go_key,
    here_key,
    name_device,
    own_address,
    reason_of,
    view,
)
from contract.errors import PublishError
from contract.policy import BroadcastUpdate


class BroadcastReceiver:
    """Reads broadcasts, one at a time.

    Args:
        device: on which the server computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._trainer: str | None = None
        self._store: dist.TCPStore | None = None
        self._group: Group | None = None

    @contextmanager
    def open(self, update: BroadcastUpdate) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """The tensors of `update`, as they come. They are the reader's own: nothing writes to them later.

        Raises:
            PublishError: the trainer cannot be reached, is lost or too slow, or announces what cannot be.
        """
        _check(update)
        is_complete = False

        def tensors(group: Group) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal is_complete
            yield from self._receive(update, group)
            is_complete = True

        try:
            yield tensors(self._join(update))
        finally:
            if not is_complete:
                self._leave()

    def close(self) -> None:
        """Leave the group."""
        self._leave()

    def _join(self, update: BroadcastUpdate) -> Group:
        deadline = time.monotonic() + update.timeout_seconds
        if update.origin.trainer != self._trainer:
            self._leave()
        try:
            go = self._ask(update)
            if go.group == 0:
                raise PublishError(f"the trainer has given up the broadcast of version {update.version}")
            if self._group is None or self._group.number != go.group:
                self._drop_group()
                assert self._store is not None
                self._group = Group(
                    self._store,
                    go.group,
                    go.backend,
                    update.rank,
                    update.world_size,
                    address=own_address(update.host, update.port),
                    device=self._device,
                    timeout_seconds=max(0.1, deadline - time.monotonic()),
                )
        except (RuntimeError, OSError) as error:
            if isinstance(error, PublishError):
                raise
            raise PublishError(
                f"the trainer at {update.host}:{update.port} cannot be joined for the broadcast of version "
                f"{update.version} ({reason_of(error)}); set publish.host to an address of the trainer's "
                f"machine that this one can reach"
            ) from error
        return self._group

    def _ask(self, update: BroadcastUpdate) -> Go:
        """Say that this server is ready, and wait for the trainer's answer."""
        timeout = timedelta(seconds=update.timeout_seconds)
        if self._store is None:
            self._store = dist.TCPStore(
                update.host, update.port, is_master=False, timeout=timeout, wait_for_workers=False
            )
            self._trainer = update.origin.trainer
        here = Here(0 if self._group is None else self._group.number, name_device(self._device))
        self._store.set(here_key(update.number, update.rank), msgspec.json.encode(here).decode())
        self._store.wait([go_key(update.number)], timeout)
        return msgspec.json.decode(self._store.get(go_key(update.number)), type=Go)

    def _receive(self, update: BroadcastUpdate, group: Group) -> Iterator[tuple[str, torch.Tensor]]:
        device = self._device if group.backend == "nccl" else torch.device("cpu")
        buckets = cut(update.tensors, update.bucket_bytes)
        store = self._store
        assert store is not None

        def check() -> None:
            # Fails at once when the trainer, whose store it is, has ended.
            store.check([go_key(update.number)])

        for number, bucket in enumerate(buckets, 1):
            # A new buffer each time: the reader may keep views of the one before.
            flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
            try:
                group.broadcast(flat, update.timeout_seconds, check)
            except RuntimeError as error:
                raise PublishError(
                    f"the broadcast of version {update.version} broke at bucket {number} of {len(buckets)}: "
                    f"the trainer ended or did not send within {update.timeout_seconds:.0f} s "
                    f"({reason_of(error)})"
                ) from error
            for slot in bucket.slots:
                yield slot.tensor.name, view(flat, slot)

    def _leave(self) -> None:
        self._drop_group()
        self._store, self._trainer = None, None

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


def _check(update: BroadcastUpdate) -> None:
    names = [tensor.name for tensor in update.tensors]
    wrong = None
    if not names:
        wrong = "no tensors"
    elif len(set(names)) < len(names):
        wrong = "a tensor twice"
    elif unknown := {tensor.dtype for tensor in update.tensors} - DTYPE_BYTES.keys():
        wrong = f"tensors of type {min(unknown)}"
    elif any(size < 0 for tensor in update.tensors for size in tensor.shape):
        wrong = "a negative size"
    elif not 0 < update.rank < update.world_size:
        wrong = f"rank {update.rank} of {update.world_size}"
    elif update.bucket_bytes < 1 or update.timeout_seconds <= 0:
        wrong = f"buckets of {update.bucket_bytes} bytes within {update.timeout_seconds} s"
    if wrong is not None:
        raise PublishError(f"the broadcast of version {update.version} announces {wrong}; it is refused")
