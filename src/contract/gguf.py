"""GGUF files made into Hugging Face folders, once: float32 weights in a cache keyed by the file's content.

The conversion needs torch and the whole model in memory, so it runs in a process of its own
(`python -m contract.gguf FILE FOLDER`): whoever asks may have neither, and gets its memory back. Processes
that ask for one file at the same time wait for the first of them.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from contract.errors import ModelError
from contract.layout import cache_folder

logger = logging.getLogger(__name__)

_LONGEST_WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.1


def dequantize(file: Path) -> Path:
    """The Hugging Face folder of a GGUF file.

    Raises:
        ModelError: the file is no causal language model that transformers can read.
    """
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    target = cache_folder() / "models" / f"{file.stem}-{digest.hexdigest()[:16]}"
    if _is_complete(target):
        return target
    with _alone_with(file):
        if not _is_complete(target):
            logger.info("converting %s to float32 safetensors in %s (once)", file.name, target)
            _convert_apart(file, target)
    return target


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


@contextmanager
def _alone_with(file: Path) -> Iterator[None]:
    """Wait until no other process of this machine converts the file. Nothing breaks where two do."""
    deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
    with file.open("rb") as stream:
        is_told = False
        # Some network file systems have no locks.
        with suppress(OSError):
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not is_told:
                        logger.info("waiting for another process that converts %s", file.name)
                        is_told = True
                    time.sleep(_POLL_SECONDS)
        yield


def _convert_apart(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        child = subprocess.run(
            [sys.executable, "-m", "contract.gguf", str(file), str(scratch)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if child.returncode != 0:
            reason = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
            raise ModelError(f"{file} cannot be read as a GGUF causal language model: {reason[0]}")
        try:
            scratch.rename(target)
        except OSError:
            # Another process was faster; the content is the same.
            if not _is_complete(target):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    arguments: dict[str, Any] = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **arguments
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **arguments)
    # The weights are plain float32 now; a leftover note of the quantisation would mislead every reader.
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
