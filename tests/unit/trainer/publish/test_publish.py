"""Both publishers against real servers: what arrives, and what happens when something goes wrong."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from contract.errors import ConfigError, PublishError
from contract.layout import RunFolder
from contract.policy import Origin
from tests.support.engine import build_engine, build_sharded, rank_process
from tests.support.ranks import run_ranks
from tests.support.weight_server import KEY, Behaviour, WeightServer, weight_server
from trainer.config.rl import RLTrainConfig
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process
from trainer.publish.base import Publisher
from trainer.publish.build import build_publisher

KINDS = ["filesystem", "collective"]
Weights = Callable[[], Mapping[str, LogicalTensor]]


def settings(kind: str, **changes: Any) -> dict[str, Any]:
    """A section `publish`; the tiny model makes several buckets of 20 KiB."""
    section: dict[str, Any] = {"type": kind, "timeout_seconds": 30.0}
    if kind == "collective":
        section["bucket_mib"] = 20 / 1024
    return section | changes


def open_publisher(
    process: Process,
    root: Path,
    section: dict[str, Any],
    servers: list[str],
    weights: Weights,
    dtype: torch.dtype = torch.float32,
) -> Publisher:
    config = RLTrainConfig.model_validate(
        {
            "model": {"name": "unused"},
            "max_steps": 1,
            "publish": section,
            "servers": servers,
            "server_key": KEY,
        }
    )
    origin = Origin("run", uuid.uuid4().hex)
    return build_publisher(config, process, RunFolder(root), weights, origin=origin, dtype=dtype)


def weights_of_run(folder: Path, process: Process, **model_settings: Any) -> Weights:
    """As the composition root has them: the model's own, and masters where an optimizer keeps them."""
    offload = model_settings.get("offload", "none")
    model = build_sharded(folder, process, **model_settings)
    engine = build_engine(model, process, offload=offload)
    return lambda: {**model.logical_state(), **engine._optimizer.weights()}


def publish_versions(
    root: Path,
    folder: Path,
    section: dict[str, Any],
    servers: list[str],
    versions: list[int],
    dtype: torch.dtype = torch.float32,
    model_settings: Mapping[str, Any] | None = None,
) -> list[dict[str, float]]:
    """On a rank: publish, moving every weight by the version's number in between."""
    process = rank_process()
    weights = weights_of_run(folder, process, **(model_settings or {}))
    publisher = open_publisher(process, root, section, servers, weights, dtype)
    try:
        metrics = []
        for version in versions:
            for tensor in weights().values():
                for piece in tensor.pieces:
                    piece.tensor.add_(version)
            metrics.append(dict(publisher.publish(version)))
        return metrics
    finally:
        publisher.close()


def expected(
    folder: Path, versions: list[int], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The file's tensors after the same additions; a tied head is not in the file."""
    tensors = load_file(folder / "model.safetensors")
    for version in versions:
        tensors = {name: tensor + version for name, tensor in tensors.items()}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def servers() -> Iterator[list[WeightServer]]:
    """Two servers that load what they get."""
    with weight_server() as first, weight_server() as second:
        yield [first, second]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world_size", "model_settings", "dtype"),
    [
        (1, {}, torch.float32),
        (2, {"fusions": ["qkv"], "offload": "full", "compute_dtype": torch.bfloat16}, torch.float32),
        (2, {"fusions": ["qkv", "gate_up"]}, torch.bfloat16),
        (2, {"dp_replicate": 2}, torch.float32),
    ],
    ids=["one rank", "two ranks, fused, full offload", "two ranks, fused, bfloat16", "two replicas"],
)
def test_every_server_has_the_weights_bit_for_bit_after_each_version(
    tmp_path: Path,
    tiny_llama: Path,
    servers: list[WeightServer],
    kind: str,
    world_size: int,
    model_settings: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    addresses, before = [server.address for server in servers], servers[0].state()["num_updates"]
    metrics = run_ranks(
        publish_versions, world_size, tmp_path, tiny_llama, settings(kind), addresses, [0, 1, 2],
        dtype, model_settings,
    )  # fmt: skip
    for state in (server.state() for server in servers):
        assert (state["version"], state["num_updates"]) == (2, before + 3)
        assert_same(state["tensors"], expected(tiny_llama, [0, 1, 2], dtype))
        # One group for all three broadcasts, though another trainer had one before.
        assert kind == "filesystem" or state["group_numbers"][-3:] == [1, 1, 1]
    for of_version in (of_version for of_rank in metrics for of_version in of_rank):
        parts = [value for name, value in of_version.items() if name.startswith("time/publish_")]
        assert len(parts) == 3 and 0 < sum(parts) <= of_version["time/publish"]


WRONG: list[tuple[str, Behaviour, str]] = [
    *((kind, "refuses", "status 409: not today") for kind in KINDS),
    *((kind, "refuses midway", "status 500: these are not the weights of this model") for kind in KINDS),
    *((kind, "lies", "that it draws with version 2") for kind in KINDS),
    *((kind, "babbles", "status 502: '<html>bad gateway</html>', which is no answer") for kind in KINDS),
    ("filesystem", "hangs", "did not answer within publish.timeout_seconds"),
    ("collective", "hangs", "did not come to 127.0.0.1"),
    ("collective", "hangs midway", "within publish.timeout_seconds"),
    ("filesystem", "dies", "the connection broke"),
    ("collective", "dies midway", "the connection broke"),
]


def publish_and_fail(
    root: Path, folder: Path, cases: list[tuple[dict[str, Any], Behaviour, list[str]]]
) -> list[tuple[str, float]]:
    """On a rank: the text of each error, and the seconds to it; no thread of Python may be left."""
    process, results = rank_process(), []
    weights = weights_of_run(folder, process)
    for section, behaviour, addresses in cases:
        if process.is_main:
            WeightServer(addresses[-1]).behave(behaviour)
        publisher = open_publisher(process, root, section, addresses, weights)
        start = time.monotonic()
        with pytest.raises(PublishError) as raised:
            publisher.publish(1)
        results.append((str(raised.value), time.monotonic() - start))
        if process.is_main and "dies" not in behaviour:
            WeightServer(addresses[-1]).behave("loads")
        publisher.close()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("publish")]
        assert not left, f"threads left: {left}"
    return results


def test_a_server_that_fails_ends_the_publish_on_every_rank_in_time(tmp_path: Path, tiny_llama: Path) -> None:
    with weight_server() as wrong, weight_server() as first, weight_server() as second:
        dying = iter([first, second])
        cases = []
        for kind, behaviour, _ in WRONG:
            seconds = 1.5 if behaviour.startswith("hangs") else 30.0
            server = next(dying) if behaviour.startswith("dies") else wrong
            cases.append((settings(kind, timeout_seconds=seconds), behaviour, [server.address]))
        for results in run_ranks(publish_and_fail, 2, tmp_path, tiny_llama, cases):
            for (kind, behaviour, told), (text, seconds) in zip(WRONG, results, strict=True):
                case = f"{kind}, {behaviour}: {text} ({seconds:.1f} s)"
                assert text.startswith("version 1 was not published: ") and told in text, case
                assert seconds < 20, case


def test_a_server_that_refuses_stays_on_its_version_and_one_that_is_well_is_not_left_waiting(
    tmp_path: Path, tiny_llama: Path
) -> None:
    with weight_server() as wrong, weight_server() as well:
        cases = [(settings("collective"), "refuses", [well.address, wrong.address])]
        run_ranks(publish_and_fail, 1, tmp_path, tiny_llama, cases)
        deadline = time.monotonic() + 10
        while not (state := well.state())["refusals"]:
            assert time.monotonic() < deadline, "the server still waits for the trainer"
            time.sleep(0.05)
        assert (state["version"], wrong.state()["version"]) == (0, 0)
        assert "has given up the broadcast" in state["refusals"][0]


def die_while_publishing(root: Path, folder: Path, section: dict[str, Any], servers: list[str]) -> str:
    """On rank 1: end without a word after the first bucket. On rank 0: the error's text."""
    process = rank_process()
    weights = weights_of_run(folder, process)
    calls = 0

    class Dying(dict[str, LogicalTensor]):
        def __getitem__(self, name: str) -> LogicalTensor:
            nonlocal calls
            calls += 1
            if process.rank == 1 and calls > 6:
                os._exit(0)
            return super().__getitem__(name)

    publisher = open_publisher(process, root, section, servers, lambda: Dying(weights()))
    try:
        publisher.publish(1)
    except PublishError as error:
        # The other rank cannot answer `run_ranks`, nor be waited for.
        (root / "told").write_text(str(error))
        publisher.close()
    return "published"


def test_a_rank_that_dies_while_publishing_leaves_the_servers_on_their_version(
    tmp_path: Path, tiny_llama: Path
) -> None:
    with weight_server() as server:
        with pytest.raises(AssertionError, match="rank 1 of 2 died without a word"):
            run_ranks(die_while_publishing, 2, tmp_path, tiny_llama, settings("collective"), [server.address])
        assert "a rank of the trainer ended" in (tmp_path / "told").read_text()
        deadline = time.monotonic() + 10
        while not (state := server.state())["refusals"]:
            assert time.monotonic() < deadline, "the server still waits for the trainer"
            time.sleep(0.05)
        assert state["version"] == 0 and "the trainer ended or did not send" in state["refusals"][0]


def fail_to_pack(root: Path, folder: Path, section: dict[str, Any], servers: list[str]) -> str:
    """On rank 1: a tensor cannot be read. On both: the error's text."""
    process = rank_process()
    weights = weights_of_run(folder, process)

    class Broken(dict[str, LogicalTensor]):
        def __getitem__(self, name: str) -> LogicalTensor:
            raise MemoryError("no memory left")

    def read() -> Mapping[str, LogicalTensor]:
        return Broken(weights()) if process.rank == 1 else weights()

    publisher = open_publisher(process, root, section, servers, read)
    with pytest.raises(PublishError) as raised:
        publisher.publish(1)
    publisher.close()
    return str(raised.value)


def test_what_fails_on_one_rank_is_told_by_all(tmp_path: Path, tiny_llama: Path) -> None:
    with weight_server() as server:
        texts = run_ranks(fail_to_pack, 2, tmp_path, tiny_llama, settings("collective"), [server.address])
        assert texts == ["version 1 was not published: rank 1: MemoryError: no memory left"] * 2
        assert server.state()["version"] == 0


def test_a_run_without_servers_is_refused(process: Process, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="servers is empty: nobody would get the weights"):
        open_publisher(process, tmp_path, settings("filesystem"), [], dict)
