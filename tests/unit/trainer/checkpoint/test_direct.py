"""Files written past the page cache hold what was written, exactly, and fail with the true reason."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trainer.checkpoint.direct import DirectFile, open_direct

BLOCK = 4 << 20
SIZES = [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 4097]


def content(num_bytes: int) -> bytes:
    """Bytes without a pattern that a block in the wrong place could repeat."""
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8).tobytes()


def open_usual(path: Path) -> DirectFile:
    """As `open_direct`, but also where the file system has no direct writes."""
    return open_direct(path) or DirectFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), path)


def write(file: DirectFile, data: bytes, share: int) -> None:
    """Hand `data` over in shares of this many bytes, each in memory that is overwritten at once."""
    for start in range(0, len(data), share):
        memory = bytearray(data[start : start + share])
        assert file.write(memoryview(memory)) == len(memory)
        memory[:] = bytes(len(memory))


@pytest.fixture
def full_file(tmp_path: Path) -> Iterator[Path]:
    """A file on a disk of 6 MiB; where mounting is not allowed, the device that is always full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        yield Path("/dev/full")
        return
    yield folder / "file"
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("share", [1_000_003, 3 * BLOCK])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_file_holds_what_was_written_and_nothing_more(tmp_path: Path, num_bytes: int, share: int) -> None:
    path, data = tmp_path / "file", content(num_bytes)
    path.write_bytes(b"older" * 10_000)
    with open_usual(path) as file:
        write(file, data, share)
    assert path.read_bytes() == data


def test_small_and_empty_writes_are_put_together(tmp_path: Path) -> None:
    path, data = tmp_path / "file", content(10_000)
    with open_usual(path) as file:
        for start in range(0, len(data), 7):
            file.write(memoryview(b""))
            file.write(memoryview(data)[start : start + 7])
    assert path.read_bytes() == data


def test_a_failed_write_closes_the_file_and_keeps_the_first_error(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="mine"), open_usual(tmp_path / "file") as file:
        file.write(memoryview(b"some"))
        raise RuntimeError("mine")
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_that_cannot_be_created_says_which(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_direct(tmp_path / "missing" / "file")
    assert caught.value.filename == str(tmp_path / "missing" / "file")


def test_a_place_without_direct_writes_is_told_by_none() -> None:
    # The kernel refuses O_DIRECT on /proc, and so do file systems that have no such writes.
    assert open_direct("/proc/self/comm") is None


def test_a_descriptor_that_refuses_the_first_block_is_written_the_usual_way(tmp_path: Path) -> None:
    # At an odd position a file system that needs alignment refuses every direct write.
    path, data = tmp_path / "file", content(BLOCK + 5)
    file = open_usual(path)
    with file:
        os.lseek(file._descriptor, 3, os.SEEK_SET)
        write(file, data, BLOCK)
        file._size += 3
    assert path.read_bytes() == bytes(3) + data


LIMITED = """
import resource, sys
from pathlib import Path
from tests.unit.trainer.checkpoint.test_direct import content, open_usual, write
path, num_bytes, limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    with open_usual(path) as file:
        write(file, content(num_bytes), 1 << 20)
except OSError as error:
    print(error.errno, error.filename)
else:
    print("written", path.read_bytes() == content(num_bytes))
"""


def write_limited(path: Path, num_bytes: int, limit: int) -> str:
    """What a process says that may not make a file larger than `limit`."""
    words = [sys.executable, "-c", LIMITED, str(path), str(num_bytes), str(limit)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(("num_bytes", "limit"), [(100_000, 50_001), (BLOCK + 100, BLOCK + 99), (1, 0)])
def test_a_limit_on_the_size_of_files_is_told_as_one(tmp_path: Path, num_bytes: int, limit: int) -> None:
    path = tmp_path / "file"
    assert write_limited(path, num_bytes, limit) == f"{errno.EFBIG} {path}"


@pytest.mark.parametrize("num_bytes", [1, 100_000, BLOCK + 1])
def test_a_file_may_be_just_as_large_as_the_limit(tmp_path: Path, num_bytes: int) -> None:
    assert write_limited(tmp_path / "file", num_bytes, num_bytes) == "written True"


def test_a_full_disk_is_told_as_one(full_file: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as caught, open_usual(full_file) as file:
        write(file, content(2 * BLOCK), BLOCK)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, full_file)
    assert set(os.listdir("/proc/self/fd")) == before
