"""A rank that is killed while a save is being written behind the step."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from contract.commit import scan, verify
from contract.errors import CheckpointError
from contract.layout import RunFolder
from tests.support.ranks import run_ranks
from tests.unit.trainer.checkpoint.fakes import FakePart, Gate, committed, open_async, process_of_rank

SECONDS = 60.0


def save_until_killed(rank: int, root: str, channel: Connection) -> None:
    """Rank 1 hangs in the write of step 2 and says so; rank 0 says how its write and its end went."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    process, gate = process_of_rank(), Gate()
    parts = {
        "model": FakePart({"w": torch.ones(40)}),
        "optimizer": FakePart({f"m{index}": torch.ones(40) for index in range(4)}, residence="host"),
    }
    manager = open_async(process, RunFolder(Path(root) / "run"), parts, gate, on_failure="warn")
    manager.save(1)
    manager.wait()
    if rank == 1:
        gate.close()
    manager.save(2)
    if rank == 1:
        assert gate.reached.wait(SECONDS)
        channel.send("hangs")
        threading.Event().wait()
    for action in (manager.wait, manager.close):
        try:
            action()
            channel.send("")
        except CheckpointError as error:
            channel.send(str(error))


def nothing() -> None:
    """Starts the server that forks processes with torch imported."""


def test_the_ranks_that_are_left_learn_of_it_and_nothing_half_written_counts(tmp_path: Path) -> None:
    run_ranks(nothing, 1)
    context = multiprocessing.get_context("forkserver")
    channels, processes = [], []
    for rank in range(2):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(
            context.Process(target=save_until_killed, args=(rank, str(tmp_path), sender), daemon=True)
        )
        processes[-1].start()
        sender.close()
        channels.append(receiver)
    try:
        assert channels[1].poll(SECONDS) and channels[1].recv() == "hangs"
        processes[1].kill()
        assert channels[0].poll(SECONDS), "rank 0 hangs"
        message = channels[0].recv()
        assert message.startswith("checkpoint of step 2 was not saved, earlier ones are unchanged: ")
        assert "another rank ended, or did not answer" in message
        # With a rank missing the run cannot go on, whatever ckpt.on_failure says; but it ends in order.
        assert channels[0].poll(SECONDS), "rank 0 hangs in close"
        assert channels[0].recv() == ""
        processes[0].join(SECONDS)
        assert processes[0].exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
    folder = RunFolder(tmp_path / "run")
    assert committed(folder) == [1] and verify(folder.checkpoints / "step_1") == []
    assert [entry.state for entry in scan(folder.checkpoints)][1:] in ([], ["uncommitted"])
