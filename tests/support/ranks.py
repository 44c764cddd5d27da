"""Run a function in N real processes that form a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
]


def _rank_main(
    rank: int,
    world_size: int,
    rendezvous: str,
    channel: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = function(*arguments)
        channel.send((True, result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # the parent must learn of everything, SystemExit included
        channel.send((False, traceback.format_exc()))
    finally:
        channel.close()


def _collect(channels: list[Connection], timeout: float) -> list[Any]:
    """Results in rank order; the first rank that fails is the one that is reported."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(channels):
        waiting = [channel for rank, channel in enumerate(channels) if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = [rank for rank in range(len(channels)) if rank not in results]
            raise AssertionError(f"ranks {ranks} of {len(channels)} did not finish within {timeout} s")
        for channel in ready:
            rank = channels.index(channel)  # pyright: ignore[reportArgumentType]
            try:
                succeeded, result = channels[rank].recv()
            except EOFError:
                raise AssertionError(f"rank {rank} of {len(channels)} died without a word") from None
            if not succeeded:
                raise AssertionError(f"rank {rank} of {len(channels)} raised:\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(channels))]


def forkserver() -> ForkServerContext:
    """Starts processes in a tenth of a second: they are forked from one that has torch imported already."""
    context = multiprocessing.get_context("forkserver")
    # Only the first process that is started decides what is imported.
    context.set_forkserver_preload(PRELOAD)
    return context


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0
) -> list[Any]:
    """Call `function(*arguments)` (a module-level function) on each of `world_size` gloo ranks; returns their
    results.

    Raises:
        AssertionError: a rank raised (with its traceback), or did not finish within `timeout` seconds.
    """
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        channels, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, f"{folder}/store", sender, function, arguments),
                daemon=True,
            )
            process.start()
            sender.close()
            channels.append(receiver)
            processes.append(process)
        try:
            return _collect(channels, timeout)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
