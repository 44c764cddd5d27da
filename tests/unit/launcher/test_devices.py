"""Counting GPUs without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.devices import count_gpus, default_processes


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("3,1", 2),
        ("0,1,-1,2", 2),
        ("0,7,1", 1),
        ("GPU-8932f937,GPU-46f6", 2),
        ("MIG-8932f937", 1),
        ("NoDevFiles", 0),
        ("1,none,2", 1),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    tmp_path: Path, visible: str | None, expected: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "tty0"):
        (tmp_path / name).write_text("")
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environment, tmp_path) == expected


def test_no_device_file_is_no_gpu_whatever_the_variable_says(tmp_path: Path) -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0
    assert count_gpus({}, tmp_path / "none") == 0


def test_one_process_per_gpu_or_one_on_a_cpu() -> None:
    assert [default_processes("auto", 8), default_processes("auto", 0), default_processes("cpu", 8)] == [
        8,
        1,
        1,
    ]
