"""A disk that fills up during a save: earlier checkpoints stay whole, and the run says how much it needed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.place import Place, trained

SIZE = re.compile(r"needs [0-9.]+ (kB|MB)")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own with 4 MiB; where mounting is not allowed, an ordinary folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    yield folder
    if is_mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_file_that_cannot_grow_fails_the_save_and_leaves_the_earlier_one(place: Place) -> None:
    place.train(max_steps=2)
    shards = [path.stat().st_size for path in place.checkpoint("sft", 2).rglob("*.distcp")]
    # The writer's threads share one queue, so that no file has the same size twice; the largest of them is
    # never smaller than the mean.
    limit = sum(shards) // len(shards) - 1000
    arguments = place.arguments("sft", "--resume", max_steps=4)
    finished = place.nursery.run(arguments, file_size_limit=limit)

    assert finished.code == 1, finished.output
    assert "checkpoint of step 4 was not saved, earlier ones are unchanged" in finished.output
    assert SIZE.search(finished.output), finished.output
    assert "Traceback" not in finished.output
    assert place.committed() == [2]
    assert [path.name for path in place.folder().checkpoints.iterdir()] == ["step_2"]
    place.train("sft", "--resume", max_steps=4)
    assert list(trained(place.metrics())) == [1, 2, 3, 4]


def test_a_disk_that_fills_up_ends_the_run_before_it_holds_half_a_checkpoint(
    place: Place, small_disk: Path
) -> None:
    place.output_dir = small_disk
    filler = small_disk / "filler"
    place.train(max_steps=1)
    free = _free(small_disk)
    # On an ordinary disk the same is asked of a limit on the size of files, which the filler stands for.
    limit = None
    if free < 4 << 20:
        filler.write_bytes(b"\0" * (free - (700 << 10)))
    else:
        limit = 100_000
    finished = place.run("sft", "--resume", max_steps=3, file_size_limit=limit)

    assert finished.code == 1, finished.output
    assert "needs" in finished.output
    assert "Traceback" not in finished.output
    assert place.committed() == [1]
    filler.unlink(missing_ok=True)
    place.train("sft", "--resume", max_steps=3)
    assert place.committed() == [1, 3]


def _free(folder: Path) -> int:
    import shutil

    return shutil.disk_usage(folder).free
