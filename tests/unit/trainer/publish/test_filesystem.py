"""What the filesystem publisher leaves on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from contract.errors import PublishError
from contract.policy import Origin
from contract.sections import FilesystemPublishConfig
from inference.receive.folder import read_folder
from tests.support.weight_server import KEY, WeightServer, weight_server
from trainer.model.export import find_export_problems
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process
from trainer.publish.bucketed import BucketPublisher
from trainer.publish.client import PolicyServers
from trainer.publish.filesystem import FolderSink

ORIGIN = Origin("run", "trainer")
TENSORS = {
    "rows": torch.arange(12.0).view(3, 4),
    "counter": torch.tensor(7),
    "halves": torch.arange(5, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "big": torch.arange(100.0),
    "nothing": torch.zeros(0, 4),
}


def weights() -> Mapping[str, LogicalTensor]:
    return {name: LogicalTensor.replicated(tensor) for name, tensor in TENSORS.items()}


@pytest.fixture(scope="module")
def server() -> Iterator[WeightServer]:
    with weight_server() as opened:
        yield opened


@contextmanager
def publisher_to(
    server: WeightServer, folder: Path, process: Process, *, keep_last: int = 2, file_bytes: int = 64
) -> Iterator[BucketPublisher]:
    config = FilesystemPublishConfig(keep_last=keep_last, timeout_seconds=20)
    sink = FolderSink(config, folder, PolicyServers([server.address], KEY), ORIGIN)
    publisher = BucketPublisher(process, weights, torch.float32, file_bytes, sink)
    try:
        yield publisher
    finally:
        publisher.close()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_tensors_of_every_type_and_size_lie_in_files_that_their_index_describes(
    tmp_path: Path, process: Process, server: WeightServer
) -> None:
    with publisher_to(server, tmp_path, process) as publisher:
        publisher.publish(4)
    folder = tmp_path / "version_4"
    assert names_in(tmp_path) == {"version_4"}
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    assert len(files) > 2 and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert find_export_problems(folder) == []
    loaded = {name: tensor for path in files for name, tensor in load_file(path).items()}
    read = dict(read_folder(folder))
    assert loaded.keys() == read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        wanted = tensor.float() if tensor.is_floating_point() else tensor
        for found in (loaded[name], read[name]):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted), name
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files), "others cannot read the files"


def test_weights_that_fit_into_one_file_need_no_index(
    tmp_path: Path, process: Process, server: WeightServer
) -> None:
    with publisher_to(server, tmp_path, process, file_bytes=10_000) as publisher:
        publisher.publish(1)
    assert names_in(tmp_path / "version_1") == {"model.safetensors"}
    assert dict(read_folder(tmp_path / "version_1")).keys() == TENSORS.keys()


def test_the_last_versions_are_kept_and_what_another_attempt_left_is_not(
    tmp_path: Path, process: Process, server: WeightServer
) -> None:
    for name in ("version_2", "version_9", "version_3.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "leftover").write_text("of a run that went back to step 2")
    with publisher_to(server, tmp_path, process, keep_last=2) as publisher:
        publisher.publish(2)
        assert names_in(tmp_path / "version_2").isdisjoint({"leftover"})
        assert "version_9" not in names_in(tmp_path)
        publisher.publish(3)
        publisher.publish(4)
        publisher.publish(5)
    assert names_in(tmp_path) == {"version_4", "version_5"}


def test_a_version_that_is_refused_leaves_the_ones_before_it(
    tmp_path: Path, process: Process, server: WeightServer
) -> None:
    with publisher_to(server, tmp_path, process, keep_last=1) as publisher:
        publisher.publish(1)
        server.behave("refuses")
        try:
            with pytest.raises(
                PublishError, match=r"did not take version 2 and stays on the one before: .*409"
            ):
                publisher.publish(2)
        finally:
            server.behave("loads")
    assert "version_1" in names_in(tmp_path) and server.state()["version"] == 1


def test_a_folder_that_cannot_be_written_says_which_and_what_to_do(
    tmp_path: Path, process: Process, server: WeightServer
) -> None:
    occupied = tmp_path / "broadcasts"
    occupied.write_text("a file where the folder should be")
    told = r"version_1\.partial cannot be written: Not a directory; free"
    with publisher_to(server, occupied, process) as publisher, pytest.raises(PublishError, match=told):
        publisher.publish(1)


def test_a_server_that_is_not_up_is_named(tmp_path: Path, process: Process) -> None:
    config = FilesystemPublishConfig(timeout_seconds=0.5)
    sink = FolderSink(config, tmp_path, PolicyServers(["http://127.0.0.1:9"], None), ORIGIN)
    publisher = BucketPublisher(process, weights, torch.float32, 1000, sink)
    with pytest.raises(PublishError, match=r"http://127\.0\.0\.1:9 is not up within .*it cannot be reached"):
        publisher.publish(1)
    publisher.close()


def test_a_key_that_is_wrong_is_told(tmp_path: Path, process: Process, server: WeightServer) -> None:
    config = FilesystemPublishConfig(timeout_seconds=10)
    sink = FolderSink(config, tmp_path, PolicyServers([server.address], "another"), ORIGIN)
    publisher = BucketPublisher(process, weights, torch.float32, 1000, sink)
    with pytest.raises(PublishError, match="status 401"):
        publisher.publish(1)
    publisher.close()
