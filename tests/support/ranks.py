"""Run a function in N real processes that form a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama"]


def _rank_main(
    rank: int, world_size: int, rendezvous: str, channel: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        result = function(*arguments)
        channel.send((True, result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # the parent must learn of everything, SystemExit included
        channel.send((False, traceback.format_exc()))
    finally:
        channel.close()


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(*arguments)` (a module-level function) on each of `world_size` gloo ranks; returns their results.

    The processes are forked from a server that has torch imported already, so a rank starts in a tenth of a second.

    Raises:
        AssertionError: a rank raised (with its traceback), or did not finish within `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        channels, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, f"{folder}/store", sender, function, arguments), daemon=True
            )
            process.start()
            sender.close()
            channels.append(receiver)
            processes.append(process)
        try:
            results = []
            for rank, receiver in enumerate(channels):
                if not receiver.poll(timeout):
                    raise AssertionError(f"rank {rank} of {world_size} did not finish within {timeout} s")
                try:
                    succeeded, result = receiver.recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} of {world_size} died without a word") from None
                if not succeeded:
                    raise AssertionError(f"rank {rank} of {world_size} raised:\n{result}")
                results.append(result)
            return results
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
