"""Checkpoints in a real S3 server on this machine: ranks, failures of the store, whole runs, `ckpt`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from contract.commit import resolve_step, scan, verify
from contract.errors import CheckpointError
from contract.layout import RunFolder
from contract.store import StoreFolder
from launcher.ckpt import main
from tests.integration.place import Place, assert_same_tensors, trained
from tests.support.ranks import run_ranks
from tests.support.resume import planned
from tests.support.s3 import BUCKET, environment, gateway, s3_environment, s3_server
from tests.unit.trainer.checkpoint.fakes import FakePart, process_of_rank
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.storage_store import StoreFiles
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig
from trainer.parallel.layout import local_part

SIZE = (1200, 600)  # 2.9 MB of fp32


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as opened:
        yield opened


@pytest.fixture(autouse=True)
def store_of_this_process(port: int) -> Iterator[None]:
    with environment(s3_environment(port)):
        yield


def checkpoints_of(name: str) -> StoreFolder:
    return StoreFolder(f"s3://{BUCKET}/{name}/sft/checkpoints")


def parts_of(fill: float) -> dict[str, FakePart]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(float(torch.Size(SIZE).numel())).reshape(SIZE) * fill
    weight = distribute_tensor(full, mesh, [Shard(0)])
    return {"model": FakePart({"w": weight}), "optimizer": FakePart({"m.w": weight * 2}, {"lr": fill})}


def save_on_ranks(port: int, root: str, url: str, steps: list[int], settings: dict[str, Any]) -> list[str]:
    """What each save says: "saved", or its error."""
    said = []
    with environment(s3_environment(port)):
        process = process_of_rank()
        folder = RunFolder(Path(root), StoreFolder(url))
        manager = CheckpointManager(CheckpointConfig(**settings), folder, process, parts_of(1.0), {})
        for step in steps:
            try:
                manager.save_if_due(step, last=True)
                said.append("saved")
            except CheckpointError as error:
                said.append(str(error))
    return said


def load_on_ranks(port: int, root: str, url: str) -> tuple[int, bool]:
    """The step that was loaded, and whether its tensors are what was saved."""
    with environment(s3_environment(port)):
        process = process_of_rank()
        parts, expected = parts_of(0.0), parts_of(1.0)
        folder = RunFolder(Path(root), StoreFolder(url))
        plan = planned(ResumeConfig(), folder, process, {})
        CheckpointManager(None, folder, process, parts, {}).load(plan)
    same = all(
        torch.equal(local_part(parts[name].held[key]), local_part(tensor))
        for name, part in expected.items()
        for key, tensor in part.held.items()
    )
    return plan.step, same and parts["optimizer"].held_values == {"lr": 1.0}


def test_two_ranks_save_and_prune_in_s3_and_one_or_three_load(port: int, tmp_path: Path) -> None:
    steps = checkpoints_of("ranks")
    said = run_ranks(save_on_ranks, 2, port, str(tmp_path), str(steps), [1, 9, 10], {"keep_last": 2})
    assert said == [["saved"] * 3] * 2
    assert [(entry.step, entry.state) for entry in scan(steps)] == [(9, "committed"), (10, "committed")]
    assert [verify(entry.path) for entry in scan(steps)] == [[], []]
    assert {name.split("/")[0] for name in steps.sizes()} == {"step_9", "step_10"}
    for world_size in (1, 3):
        loaded = run_ranks(load_on_ranks, world_size, port, str(tmp_path), str(steps))
        assert loaded == [(10, True)] * world_size


@pytest.mark.parametrize("status", [403, 0], ids=["access denied", "connection broken off"])
def test_an_upload_that_fails_on_one_rank_is_raised_on_both_and_leaves_no_step(
    port: int, tmp_path: Path, status: int
) -> None:
    steps = checkpoints_of(f"failing_{status}")

    def answer(method: str, path: str) -> int | None:
        return status if method == "PUT" and "step_2/trainer/__1_" in path else None

    with gateway(port, answer) as gate:
        first, second = run_ranks(save_on_ranks, 2, gate, str(tmp_path), str(steps), [1, 2, 3], {})
    assert first[0] == second[0] == first[2] == second[2] == "saved"
    for message in (first[1], second[1]):
        assert message.startswith("checkpoint of step 2 was not saved, earlier ones are unchanged: rank 1: ")
        assert f"{steps}/step_2/trainer/__1_" in message
        assert status == 0 or "told to refuse" in message
    assert [(entry.step, entry.state) for entry in scan(steps)] == [(1, "committed"), (3, "committed")]
    assert not [name for name in steps.sizes() if name.startswith("step_2/")]


def test_a_commit_marker_that_is_refused_leaves_the_step_before_the_latest(port: int, tmp_path: Path) -> None:
    steps = checkpoints_of("marker")

    def answer(method: str, path: str) -> int | None:
        return 403 if method == "PUT" and path.endswith("step_2/complete.json") else None

    with gateway(port, answer) as gate:
        (said,) = run_ranks(save_on_ranks, 1, gate, str(tmp_path), str(steps), [1, 2], {})
    assert said[0] == "saved" and "told to refuse" in said[1]
    resolved = resolve_step(steps)
    assert resolved is not None
    assert (resolved.entry.step, resolved.warnings) == (1, ())


def test_a_store_that_is_gone_or_has_no_such_bucket_is_one_clear_error(port: int, tmp_path: Path) -> None:
    with gateway(port, lambda method, path: None) as gate:
        pass  # nobody listens there any more
    for where, url, reason in (
        (gate, str(checkpoints_of("gone")), "Could not connect"),
        (port, "s3://no-such-bucket/sft/checkpoints", "bucket does not exist"),
    ):
        with pytest.raises(AssertionError) as error:
            run_ranks(save_on_ranks, 2, where, str(tmp_path), url, [1], {})
        assert f"CheckpointError: checkpoints cannot be saved in {url}: rank 0: " in str(error.value)
        assert reason in str(error.value)


def test_a_file_in_several_parts_arrives_whole_or_not_at_all(port: int) -> None:
    folder = checkpoints_of("parts")
    files = StoreFiles(folder, part_bytes=5 << 20)
    content = memoryview(torch.arange(3 << 20, dtype=torch.int32).numpy().tobytes())
    with files.create(f"{folder}/whole") as file:
        file.write(content)
    assert folder.read_bytes("whole") == content
    with pytest.raises(OSError, match="broken"), files.create(f"{folder}/half") as file:
        file.write(content)
        raise OSError("broken")
    assert folder.sizes() == {"whole": len(content)}
    uploads = folder.filesystem.call_s3("list_multipart_uploads", Bucket=BUCKET)  # pyright: ignore[reportAttributeAccessIssue]
    assert not uploads.get("Uploads")


def test_a_process_that_used_a_store_ends_by_itself(port: int) -> None:
    program = (
        "from contract.store import StoreFolder\n"
        f"folder = StoreFolder({str(checkpoints_of('end'))!r})\n"
        "folder.write_bytes('a', b'1')\nassert folder.sizes() == {'a': 1}\n"
    )
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, ""), time.monotonic() - start


@pytest.fixture
def store_place(place: Place, port: int) -> Place:
    """A place whose runs inherit the way to the S3 server."""
    place.environment = s3_environment(port)
    return place


def test_a_run_in_s3_equals_one_in_its_folder_resumes_and_is_served_by_ckpt(
    store_place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, url = store_place, f"s3://{BUCKET}/whole"
    options: dict[str, Any] = {"max_steps": 4, "ckpt__interval": 2}
    place.train("local", **options)
    place.train("remote", **{**options, "max_steps": 2}, ckpt__url=url)
    refused = place.run("remote", **options, ckpt__url=url)
    assert refused.code == 2, refused.output
    place.train("remote", "--resume", **options, ckpt__url=url)
    run, steps = place.folder("remote").root, StoreFolder(f"{url}/remote/checkpoints")
    assert not (run / "checkpoints").exists()
    assert trained(place.metrics("remote")) == trained(place.metrics("local"))
    assert_same_tensors(steps / "step_4", place.checkpoint("local", 4))

    for where in (str(run), str(steps), f"{url}/remote"):
        assert main(["ls", where]) == main(["verify", where]) == 0
        out = capsys.readouterr().out
        assert "step_2: ok" in out and "step_4: ok" in out and out.count("committed") == 2
    for where, target in ((str(run), None), (f"{steps}/step_4", tmp_path / "exported")):
        assert main(["export", where, *(["--out", str(target)] if target else [])]) == 0
        assert ((target or run / "weights" / "step_4") / "model.safetensors").is_file()
    assert main(["rm", str(run), "--step", "2"]) == 0
    assert main(["rm", str(steps), "--step", "4"]) == 1
    assert "--force" in capsys.readouterr().err
    assert [entry.step for entry in scan(steps)] == [4]


def test_a_new_run_over_steps_in_a_store_is_refused_and_clean_deletes_them(
    store_place: Place,
) -> None:
    place, url = store_place, f"s3://{BUCKET}/clean"
    steps = StoreFolder(f"{url}/sft/checkpoints")
    options = {"max_steps": 1, "ckpt__url": url}
    place.train(**options)
    place.output_dir = place.root / "another_machine"
    refused = place.run(**options)
    assert refused.code == 2
    assert f"{steps} holds checkpoints already (the latest is step 1)" in refused.output
    before = scan(steps)[0].record
    place.train("sft", "--resume", **{**options, "max_steps": 2})
    assert [entry.step for entry in scan(steps)] == [1, 2]
    place.train("sft", "--clean", **options)
    (entry,) = scan(steps)
    assert entry.step == 1 and entry.record != before
