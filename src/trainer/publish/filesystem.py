"""Weights as safetensors files in the run folder, which the policy servers read.

A version lies in `broadcasts/version_N`, whole or not at all: it is written beside, made durable and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import TensorSpec, serialize_file

from contract.broadcast import Bucket
from contract.commit import PARTIAL_SUFFIX, fsync
from contract.errors import PublishError
from contract.policy import FolderUpdate, Origin
from contract.sections import FilesystemPublishConfig
from trainer.publish.client import Calls, PolicyServers
from trainer.publish.gather import GatherPlan

logger = logging.getLogger(__name__)

SHARD_BYTES = 512 * 2**20
"""Weights in one file, which is what is gathered at a time."""
_PREFIX = "version_"


class FolderSink:
    """See `trainer.publish.bucketed.Sink`.

    Args:
        folder: `broadcasts` of the run.
        origin: whose weights these are.
    """

    def __init__(
        self, config: FilesystemPublishConfig, folder: Path, servers: PolicyServers, origin: Origin
    ) -> None:
        self._config = config
        self._origin = origin
        # The servers' working folder is another one.
        self._folder = folder.absolute()
        self._servers = servers
        self._file_mode = _new_file_mode()
        self._have_answered = False
        self._version = 0
        self._plan: GatherPlan | None = None
        self._calls: Calls | None = None

    def begin(self, version: int, plan: GatherPlan) -> None:
        """See `Sink`."""
        self._version, self._plan, self._calls = version, plan, None
        with self._explained():
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)

    def put(self, index: int, bucket: Bucket, flat: torch.Tensor) -> None:
        """See `Sink`."""
        flat = flat.cpu()
        specs = {
            slot.tensor.name: TensorSpec(
                dtype=slot.tensor.dtype,
                shape=slot.tensor.shape,
                data_ptr=flat.data_ptr() + slot.start,
                data_len=slot.stop - slot.start,
            )
            for slot in bucket.slots
        }
        path = self._partial / self._file_name(index)
        with self._explained():
            try:
                serialize_file(specs, str(path), metadata={"format": "pt"})
            except Exception as error:  # safetensors raises its own type
                raise OSError(None, str(error), str(path)) from error
            fsync(path)

    def finish(self) -> None:
        """See `Sink`."""
        with self._explained():
            self._write_index()
            for path in self._partial.iterdir():
                # safetensors makes its files for the owner only; a server may be another user.
                path.chmod(self._file_mode)
            fsync(self._partial)
            if self._target.exists():
                # Of an attempt that the run went back behind; nobody reads it.
                shutil.rmtree(self._target)
            self._partial.rename(self._target)
            fsync(self._folder)
        deadline = time.monotonic() + self._config.timeout_seconds
        if not self._have_answered:
            self._servers.wait_until_up(deadline)
            self._have_answered = True
        update = FolderUpdate(self._version, str(self._target), self._origin)
        self._calls = self._servers.update([update] * len(self._servers), deadline)
        self._calls.finish()
        self._prune()

    def abort(self) -> None:
        """See `Sink`."""
        if self._calls is not None:
            self._calls.cancel()

    def close(self) -> None:
        """See `Sink`."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self._servers.close()

    @property
    def _target(self) -> Path:
        return self._folder / f"{_PREFIX}{self._version}"

    @property
    def _partial(self) -> Path:
        return self._target.with_name(self._target.name + PARTIAL_SUFFIX)

    def _file_name(self, index: int) -> str:
        assert self._plan is not None
        count = len(self._plan.buckets)
        return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"

    def _write_index(self) -> None:
        assert self._plan is not None
        buckets = self._plan.buckets
        if len(buckets) == 1:
            return
        index = {
            "metadata": {"total_size": sum(bucket.num_bytes for bucket in buckets)},
            "weight_map": {
                slot.tensor.name: self._file_name(number)
                for number, bucket in enumerate(buckets)
                for slot in bucket.slots
            },
        }
        path = self._partial / "model.safetensors.index.json"
        path.write_text(json.dumps(index))
        fsync(path)

    def _prune(self) -> None:
        """Every server has loaded this version, so none reads another one."""
        found = {}
        for path in self._folder.glob(f"{_PREFIX}*"):
            number = path.name.removeprefix(_PREFIX)
            if number.isdecimal():
                found[int(number)] = path
        kept = sorted(number for number in found if number <= self._version)[-self._config.keep_last :]
        for number in found.keys() - set(kept):
            try:
                shutil.rmtree(found[number])
            except OSError as error:
                logger.warning("old weights %s cannot be removed: %s", found[number], error.strerror)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PublishError(
                f"publish.type = 'filesystem', but {error.filename or self._partial} cannot be written: "
                f"{error.strerror}; free space, or lower publish.keep_last = {self._config.keep_last}, or "
                f"set publish.type = 'collective'"
            ) from error


def _new_file_mode() -> int:
    """Rights of a new file. Asked for where no other thread makes files: the mask can only be read by a
    change.
    """
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
