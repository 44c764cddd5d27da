"""How the trainer and its receivers find, keep and lose their group."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping

import pytest
import torch

from contract.broadcast import go_key, here_key
from contract.errors import ConfigError, PublishError
from contract.policy import Origin
from contract.sections import CollectivePublishConfig
from tests.support.weight_server import KEY, weight_server
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process
from trainer.publish.bucketed import BucketPublisher
from trainer.publish.client import PolicyServers
from trainer.publish.collective import BroadcastSink

TENSORS = {f"layer_{number}": torch.full((4, 4), float(number)) for number in range(5)}
BUCKET_BYTES = 128


def weights() -> Mapping[str, LogicalTensor]:
    return {name: LogicalTensor.replicated(tensor) for name, tensor in TENSORS.items()}


def publisher_to(addresses: list[str], process: Process, **settings: str) -> BucketPublisher:
    config = CollectivePublishConfig.model_validate({"timeout_seconds": 20, **settings})
    sink = BroadcastSink(
        config, PolicyServers(addresses, KEY), Origin("run", uuid.uuid4().hex), process.device, BUCKET_BYTES
    )
    return BucketPublisher(process, weights, torch.float32, BUCKET_BYTES, sink)


def test_an_end_that_lost_the_group_gets_a_new_one_together_with_all_others(process: Process) -> None:
    with weight_server() as first, weight_server() as second:
        publisher = publisher_to([first.address, second.address], process)
        publisher.publish(1)
        publisher.publish(2)
        first.behave("refuses midway")
        with pytest.raises(PublishError, match="these are not the weights of this model"):
            publisher.publish(3)
        first.behave("loads")
        publisher.publish(4)
        publisher.publish(5)
        publisher.close()
        for server in (first, second):
            state = server.state()
            numbers = state["group_numbers"]
            assert state["version"] == 5 and numbers[:2] == [1, 1] and numbers[-2:] == [2, 2], numbers
            assert all(torch.equal(state["tensors"][name], tensor) for name, tensor in TENSORS.items())


def test_a_server_that_was_started_again_joins_a_new_group_with_the_others(process: Process) -> None:
    with weight_server() as first, weight_server() as second:
        publisher = publisher_to([first.address, second.address], process)
        publisher.publish(1)
        first.behave("forgets")
        publisher.publish(2)
        first.behave("loads")
        publisher.publish(3)
        publisher.close()
        for server in (first, second):
            state = server.state()
            assert (state["version"], state["group_numbers"]) == (3, [1, 2, 2])


def test_a_run_keeps_no_keys_of_versions_that_are_loaded(process: Process) -> None:
    with weight_server() as first, weight_server() as second:
        config = CollectivePublishConfig(timeout_seconds=20)
        servers = PolicyServers([first.address, second.address], KEY)
        sink = BroadcastSink(config, servers, Origin("run", "trainer"), process.device, BUCKET_BYTES)
        publisher = BucketPublisher(process, weights, torch.float32, BUCKET_BYTES, sink)
        store = sink._store
        assert store is not None
        publisher.publish(1)
        num_keys = store.num_keys()  # of the group, which is kept
        for version in (2, 3):
            publisher.publish(version)
            assert store.num_keys() == num_keys, version
        second.behave("refuses")
        with pytest.raises(PublishError, match="not today"):
            publisher.publish(4)
        second.behave("loads")
        publisher.publish(5)
        assert not store.check([go_key(4)]) and not store.check([here_key(4, 1)])
        publisher.close()


def test_nccl_is_refused_where_an_end_has_no_gpu(process: Process) -> None:
    with weight_server() as server:
        publisher = publisher_to([server.address], process, backend="nccl")
        with pytest.raises(
            PublishError, match=r"publish\.backend = 'nccl' needs a GPU .* compute on cpu, cpu"
        ):
            publisher.publish(1)
        publisher.close()
        assert server.state()["version"] == 0


def test_a_host_of_another_machine_is_refused_before_anything_is_sent(process: Process) -> None:
    servers = PolicyServers([], None)
    with pytest.raises(ConfigError, match=r"publish\.host = '192\.0\.2\.1' is no address of this machine"):
        BroadcastSink(
            CollectivePublishConfig(host="192.0.2.1"),
            servers,
            Origin("run", "trainer"),
            process.device,
            BUCKET_BYTES,
        )
    servers.close()


def test_the_store_listens_on_the_configured_address_only(process: Process) -> None:
    servers = PolicyServers([], None)
    sink = BroadcastSink(
        CollectivePublishConfig(), servers, Origin("run", "trainer"), process.device, BUCKET_BYTES
    )
    with socket.create_connection(("127.0.0.1", sink._port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", sink._port), timeout=5)
    sink.close()
