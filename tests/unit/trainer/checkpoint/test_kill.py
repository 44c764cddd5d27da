"""kill -9 at any instant of a run that saves all the time."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from contract.commit import scan, verify
from contract.layout import RunFolder
from tests.support.ranks import run_ranks
from tests.support.resume import planned
from tests.unit.trainer.checkpoint.fakes import FakePart, single_process
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig

KEEP_LAST = 2
NUM_KILLS = 10


def save_for_ever(root: str, resume: bool, channel: Connection) -> None:
    """Go on from the latest step; every weight equals the step. Sends each step once it is saved."""
    torch.set_num_threads(1)
    folder = RunFolder(Path(root))
    with single_process() as process:
        parts = {
            "model": FakePart({"w": torch.zeros(64, 64), "b": torch.zeros(7)}),
            "progress": FakePart({}, {"step": 0}),
        }
        manager = CheckpointManager(CheckpointConfig(keep_last=KEEP_LAST), folder, process, parts, {})
        if resume:
            plan = planned(ResumeConfig(), folder, process, {})
            manager.load(plan)
            assert plan.step == parts["progress"].held_values["step"]
            assert bool((parts["model"].held["w"] == plan.step).all())
        step = parts["progress"].held_values["step"]
        while True:
            step += 1
            for tensor in parts["model"].held.values():
                tensor.fill_(step)
            parts["progress"].held_values["step"] = step
            manager.save(step)
            channel.send(step)


def nothing() -> None:
    """Starts the server that forks processes with torch imported."""


def test_after_a_kill_at_any_instant_all_that_was_saved_is_there_and_whole(tmp_path: Path) -> None:
    run_ranks(nothing, 1)
    context = multiprocessing.get_context("forkserver")
    checkpoints = tmp_path / "checkpoints"
    instants = random.Random(1)
    newest = 0
    for kill in range(NUM_KILLS):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=save_for_ever, args=(str(tmp_path), kill > 0, sender), daemon=True)
        process.start()
        sender.close()
        try:
            assert receiver.poll(60), "the process saved nothing"
            time.sleep(instants.uniform(0.0, 0.12))
        finally:
            process.kill()
            process.join()
        try:
            while receiver.poll():
                newest = receiver.recv()
        except EOFError:
            pass
        committed = [entry for entry in scan(checkpoints) if entry.state == "committed"]
        assert len(committed) >= min(newest, KEEP_LAST)
        assert newest <= committed[-1].step <= newest + 1
        assert [verify(entry.path) for entry in committed] == [[]] * len(committed)
        # Nothing is left for ever: what a kill leaves is one half-written and one half-deleted step.
        assert len(list(checkpoints.iterdir())) <= KEEP_LAST + 2
    assert newest > NUM_KILLS
