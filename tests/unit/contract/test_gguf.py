"""GGUF files become Hugging Face folders once, in a process that never outlives the one that asked."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import xxhash

from contract.errors import ModelError
from contract.gguf import dequantize
from launcher.alive import marked_processes
from tests.support.gguf_file import write_endless_conversion, write_gguf
from tests.support.runs import MARK, wait_until

_ASK = """
import signal, sys
from pathlib import Path
from contract.errors import Interrupted
from contract.gguf import dequantize

def interrupt(signum, frame):
    raise Interrupted("told to end", signum)

if sys.argv[2] == "handles":  # as the parts of a run do
    signal.signal(signal.SIGTERM, interrupt)
dequantize(Path(sys.argv[1]))
"""


def test_a_gguf_file_is_converted_once_into_a_folder_of_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tensors = write_gguf(tmp_path / "tiny.gguf")
    folder = dequantize(tmp_path / "tiny.gguf")
    assert folder.parent == tmp_path / "cache" / "tailrace" / "models"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    found = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)
    # The second time nothing is written; a copy of the file elsewhere is the same model.
    (folder / "config.json").touch()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    copy.write_bytes((tmp_path / "tiny.gguf").read_bytes())
    assert dequantize(copy) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_damaged_gguf_file_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match="cannot be read as a GGUF causal language model"):
        dequantize(tmp_path / "bad.gguf")
    assert list((tmp_path / "cache" / "tailrace" / "models").iterdir()) == []


def test_who_asks_while_another_process_converts_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "contract.gguf")
    content = b"no model: to convert it is an error"
    file = tmp_path / "tiny.gguf"
    file.write_bytes(content)
    name = f"tiny-{xxhash.xxh3_128(content).hexdigest()[:16]}"
    target = tmp_path / "cache" / "tailrace" / "models" / name
    with file.open("rb") as held, ThreadPoolExecutor() as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        asked = pool.submit(dequantize, file)
        wait_until(lambda: "waiting for another process" in caplog.text, "the wait", seconds=20)
        target.mkdir(parents=True)
        (target / "config.json").touch()
        fcntl.flock(held, fcntl.LOCK_UN)
        assert asked.result(20) == target


@pytest.mark.parametrize(
    ("signum", "to_all", "handles"),
    [
        (signal.SIGINT, True, ""),  # as a terminal sends it
        (signal.SIGTERM, False, "handles"),
        (signal.SIGTERM, False, ""),
        (signal.SIGKILL, False, ""),
    ],
)
@pytest.mark.parametrize("midway", [False, True])
def test_a_signal_during_the_conversion_leaves_no_process_and_no_file(
    midway: bool, signum: int, to_all: bool, handles: str, tmp_path: Path
) -> None:
    (tmp_path / "tiny.gguf").touch()
    models = tmp_path / "cache" / "tailrace" / "models"
    endless, begun = write_endless_conversion(tmp_path / "endless")
    asking = subprocess.Popen(
        [sys.executable, "-c", _ASK, str(tmp_path / "tiny.gguf"), handles],
        env={**os.environ, **endless, "XDG_CACHE_HOME": str(tmp_path / "cache"), MARK: str(tmp_path)},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )

    def alive() -> int:
        return len(marked_processes(MARK, str(tmp_path)) or [])

    wait_until(begun.exists if midway else lambda: alive() == 2, "the conversion")
    assert not midway or len([*models.iterdir()]) == 1
    (os.killpg if to_all else os.kill)(asking.pid, signum)
    asking.wait(30)
    wait_until(lambda: not alive(), "the end of the process that converts", seconds=20)
    assert not models.exists() or [*models.iterdir()] == []
