"""The receiver's side alone; tests/unit/trainer/publish has both."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from contract.broadcast import Go, go_key, here_key, wait_until
from contract.errors import PublishError
from contract.policy import BroadcastUpdate, Origin, TensorInfo
from inference.receive.broadcast import BroadcastReceiver
from inference.receive.build import open_update

UPDATE = BroadcastUpdate(
    version=3,
    tensors=[TensorInfo("a", "float32", [2, 3]), TensorInfo("b", "int64", [])],
    backend="auto",
    host="127.0.0.1",
    port=1,
    origin=Origin("run", "trainer"),
    number=1,
    rank=1,
    world_size=2,
    bucket_bytes=1000,
    timeout_seconds=0.5,
)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tensors": []}, "announces no tensors"),
        ({"tensors": [UPDATE.tensors[0]] * 2}, "announces a tensor twice"),
        ({"tensors": [TensorInfo("a", "float7", [2])]}, "announces tensors of type float7"),
        ({"tensors": [TensorInfo("a", "int8", [2, -1])]}, "announces a negative size"),
        ({"rank": 2}, "announces rank 2 of 2"),
        ({"rank": 0}, "announces rank 0 of 2"),
        ({"bucket_bytes": 0}, "announces buckets of 0 bytes"),
    ],
)
def test_what_cannot_be_is_refused_before_the_trainer_is_asked(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(PublishError, match=told), open_update(msgspec.structs.replace(UPDATE, **changes)):
        pass


def test_a_trainer_that_is_not_there_is_an_error_in_time() -> None:
    start = time.monotonic()
    told = r"127\.0\.0\.1:1 cannot be joined for the broadcast of version 3"
    with pytest.raises(PublishError, match=told), open_update(UPDATE):
        pass
    assert time.monotonic() - start < 15


def open_store() -> dist.TCPStore:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def test_a_trainer_that_does_not_answer_or_gives_up_is_an_error() -> None:
    store = open_store()
    update = msgspec.structs.replace(UPDATE, port=store.port)
    with pytest.raises(PublishError, match="cannot be joined"), open_update(update):
        pass
    assert store.check([here_key(1, 1)])
    store.set(go_key(1), msgspec.json.encode(Go(0, "gloo")).decode())
    with pytest.raises(PublishError, match="has given up the broadcast of version 3"), open_update(update):
        pass


def test_a_trainer_that_says_go_and_does_not_come_is_an_error_in_time() -> None:
    store = open_store()
    store.set(go_key(1), msgspec.json.encode(Go(1, "gloo")).decode())
    update = msgspec.structs.replace(UPDATE, port=store.port)
    start = time.monotonic()
    with pytest.raises(PublishError, match="cannot be joined"), open_update(update) as tensors:
        torch.stack([tensor for _, tensor in tensors])
    assert time.monotonic() - start < 15


def test_a_trainer_that_ends_is_noticed_also_by_a_group_that_does_not_notice() -> None:
    store = open_store()

    class Deaf:
        """As a group of nccl, whose receivers wait for a sender that is gone."""

        backend = "nccl"

        def broadcast(self, flat: torch.Tensor, timeout_seconds: float, check: Callable[[], None]) -> None:
            check()  # the trainer is there
            servers.clear()
            wait_until(lambda: False, 20, check)

    servers = [store]
    receiver = BroadcastReceiver(torch.device("cpu"))
    receiver._store = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    del store
    group: Any = Deaf()
    start = time.monotonic()
    with pytest.raises(PublishError, match="the trainer ended or did not send"):
        list(receiver._receive(UPDATE, group))
    assert time.monotonic() - start < 15
