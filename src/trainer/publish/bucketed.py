"""The course of a publish that every kind shares: bucket by bucket to rank 0, and from there into a sink.

The sink works in a thread of its own on rank 0, so the ranks pack the next bucket meanwhile, and they go on
agreeing with each other while it waits for servers: no collective of theirs runs into its time limit, and a
failure on any rank ends the publish on all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from contract.broadcast import Bucket
from contract.errors import PublishError, TailraceError
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process
from trainer.publish.gather import GatherPlan, collect, make_plan, pack

T = TypeVar("T")
_SLICE_SECONDS = 1.0
"""Longest silence of rank 0 towards the others while its sink works."""


class Sink(Protocol):
    """Takes buckets on rank 0 and brings them to the servers. All but `abort` and `close` run in one thread
    beside the training thread; all may raise PublishError.
    """

    def begin(self, version: int, plan: GatherPlan) -> None:
        """A new version comes, in the buckets of `plan`."""
        ...

    def put(self, index: int, bucket: Bucket, flat: torch.Tensor) -> None:
        """The next bucket; `flat` (uint8, on the host or on the GPU of rank 0) is the sink's own."""
        ...

    def finish(self) -> None:
        """That was all: return when every server draws with it."""
        ...

    def abort(self) -> None:
        """The version is given up. Called while another method may still be running."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class BucketPublisher:
    """See `trainer.publish.base.Publisher`.

    Args:
        weights: this rank's share of all weights, as they are now.
        dtype: in which floating-point weights travel.
        bucket_bytes: most that is gathered at a time.
        sink: on rank 0; None elsewhere.
    """

    def __init__(
        self,
        process: Process,
        weights: Callable[[], Mapping[str, LogicalTensor]],
        dtype: torch.dtype,
        bucket_bytes: int,
        sink: Sink | None,
    ) -> None:
        self._process = process
        self._weights = weights
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._sink = sink
        self._thread = None if sink is None else ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._plan: GatherPlan | None = None
        self._job: Future[None] | None = None

    def publish(self, version: int) -> Mapping[str, float]:
        """See `Publisher`."""
        start = time.perf_counter()
        try:
            seconds = self._publish(version)
        except BaseException as error:
            if self._sink is not None:
                self._sink.abort()
            if isinstance(error, RuntimeError) and not isinstance(error, TailraceError):
                # gloo's own text names files and lines of its source; it is in the log, with the traceback.
                raise PublishError(
                    f"version {version} was not published: a rank of the trainer ended, or did not answer "
                    f"within deployment.collective_timeout_seconds"
                ) from error
            raise
        return {"time/publish": time.perf_counter() - start, **seconds}

    def close(self) -> None:
        """See `Publisher`."""
        if self._sink is not None and self._thread is not None:
            self._sink.abort()
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._sink.close()

    def _publish(self, version: int) -> dict[str, float]:
        weights = self._weights()
        if self._plan is None:
            self._plan = make_plan(weights, self._dtype, self._bucket_bytes, self._process)
        plan, gather_seconds, write_seconds = self._plan, 0.0, 0.0
        self._submit(lambda sink: sink.begin(version, plan))
        for index, bucket in enumerate(plan.buckets):
            start = time.perf_counter()
            mine = self._attempt(lambda bucket=bucket: pack(plan, bucket, weights, self._process))
            packed = time.perf_counter()
            self._agree(version)
            agreed = time.perf_counter()
            assert isinstance(mine, torch.Tensor), "a rank that could not pack does not get here"
            whole = collect(plan, bucket, mine, self._process)
            if whole is not None:
                self._submit(lambda sink, i=index, b=bucket, whole=whole: sink.put(i, b, whole))
            gather_seconds += packed - start + time.perf_counter() - agreed
            write_seconds += agreed - packed
        start = time.perf_counter()
        self._agree(version)
        write_seconds += time.perf_counter() - start
        start = time.perf_counter()
        self._submit(lambda sink: sink.finish())
        self._agree(version)
        return {
            "time/publish_gather": gather_seconds,
            "time/publish_write": write_seconds,
            "time/publish_wait": time.perf_counter() - start,
        }

    def _submit(self, work: Callable[[Sink], None]) -> None:
        if self._sink is not None and self._thread is not None:
            self._job = self._thread.submit(work, self._sink)

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """Do what may fail on one rank only; `_agree` tells the others."""
        try:
            return action()
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self._job = failed
            return None

    def _agree(self, version: int) -> None:
        """Wait for the sink, and go on if nothing has failed anywhere; collective.

        Raises:
            PublishError: something has; raised on every rank.
        """
        while True:
            if self._job is not None:
                wait([self._job], _SLICE_SECONDS)
            is_done = self._job is None or self._job.done()
            error = self._job.exception() if self._job is not None and is_done else None
            failed, pending = self._process.all_max_each([float(error is not None), float(not is_done)])
            if failed:
                raise self._failure(version, error) from error
            if not pending:
                self._job = None
                return

    def _failure(self, version: int, error: BaseException | None) -> PublishError:
        """The reasons of all ranks in one error; collective."""
        reason = None
        if error is not None:
            reason = str(error) if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"
        reasons: list[str | None] = [None] * self._process.world_size
        dist.all_gather_object(reasons, reason, group=self._process.control_group)
        told = [
            text if rank == 0 else f"rank {rank}: {text}"
            for rank, text in enumerate(reasons)
            if text is not None
        ]
        return PublishError(f"version {version} was not published: {'; '.join(told)}")
