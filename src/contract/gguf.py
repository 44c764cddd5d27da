"""GGUF files made into Hugging Face folders, once: float32 weights in a cache keyed by the file's content.

The conversion needs torch and the whole model in memory, so it runs in a process of its own
(`python -m contract.gguf FILE SCRATCH TARGET PARENT`): whoever asks may have neither, and gets its memory
back. Processes that ask for one file at the same time wait for the first of them.

Invariants: a folder appears under its name when it is complete. Whatever signal ends the process that asks,
or an exception in it, ends the conversion, too, and its scratch folder is removed: by the process that asked
or, if that was killed, by the one that converts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import xxhash

from contract.attempt import die_with_parent, signal_name
from contract.errors import EXIT_SIGNAL_BASE, ModelError
from contract.layout import cache_folder

logger = logging.getLogger(__name__)

_LONGEST_SECONDS = 3600.0
_POLL_SECONDS = 0.1
_ID_BYTES = 4


def dequantize(file: Path) -> Path:
    """The Hugging Face folder of a GGUF file.

    Raises:
        ModelError: the file is no causal language model that transformers can read, or was not converted
            within an hour.
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
    deadline = time.monotonic() + _LONGEST_SECONDS
    with file.open("rb") as stream:
        is_told = False
        while not _lock(stream):
            if not is_told:
                logger.info("waiting for another process that converts %s", file.name)
                is_told = True
            if time.monotonic() >= deadline:
                raise ModelError(
                    f"another process has been converting {file} for {_LONGEST_SECONDS / 60:g} minutes; wait "
                    f"for it or end it, and start again"
                )
            time.sleep(_POLL_SECONDS)
        yield


def _lock(stream: BinaryIO) -> bool:
    """Whether the file is ours now, or cannot be locked at all, as on some network file systems."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _convert_apart(file: Path, target: Path) -> None:
    # The child makes it, so that no signal can come between the folder and its removal.
    scratch = target.with_name(f"{target.name}.{secrets.token_hex(_ID_BYTES)}")
    words = [str(file), str(scratch), str(target), str(os.getpid())]
    try:
        # An exception in here, which a handler of signals may raise, kills the child.
        child = subprocess.run(
            [sys.executable, "-m", "contract.gguf", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
            timeout=_LONGEST_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{file} was not converted within {_LONGEST_SECONDS / 60:g} minutes") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if child.returncode < 0:
        name = signal_name(-child.returncode)
        raise ModelError(
            f"the conversion of {file} was killed by {name}; the kernel does this when memory runs out, and "
            f"a GGUF model is unpacked to float32: four bytes per parameter"
        )
    if child.returncode > 0:
        reason = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise ModelError(f"{file} cannot be read as a GGUF causal language model: {reason[0]}")


def _main(file: Path, scratch: Path, target: Path, parent: int) -> None:
    """The process that converts."""

    def end(signum: int, frame: FrameType | None) -> None:
        sys.exit(EXIT_SIGNAL_BASE + signum)

    signal.signal(signal.SIGTERM, end)
    try:
        die_with_parent(parent)
        scratch.mkdir(parents=True)
        _convert(file, scratch)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        # Another process was faster; the content is the same.
        if not _is_complete(target):
            raise


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
    _main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
