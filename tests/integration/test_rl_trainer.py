"""The RL trainer as a process, between a channel and a policy server; all but the orchestrator is real."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from contract.attempt import read_exit
from contract.channel.filesystem import FilesystemSender
from contract.commit import scan, verify
from contract.layout import RunFolder
from contract.rollout import Message, encode_message
from contract.store import read_bytes
from tests.support.ranks import PRELOAD
from tests.support.stream import RUN_ID, batch_message, end_message, rl_sample, snapshot_of
from tests.support.tiny_model import write_tiny_model
from tests.support.weight_server import KEY, weight_server

SECONDS = 120.0


def write_run(root: Path, server: str, **changes: Any) -> tuple[RunFolder, Path]:
    """The run's folder, and the configuration of a trainer that saves every step behind the next."""
    folder = RunFolder(root / "rl")
    folder.root.mkdir(exist_ok=True)
    folder.run_id.write_text(RUN_ID)
    sections: dict[str, Mapping[str, Any]] = {
        "model": {"name": str(root / "model"), "init": "random", "offload": "optimizer"},
        "log": {"live": False, "peak_tflops": 1.0},
        "deployment": {"device": "cpu", "num_threads": 1},
        "ckpt": {"interval": 1, "async_save": True},
        **changes,
    }
    lines = [f'output_dir = "{root}"', "max_steps = 4", "seq_len = 16", "batch_timeout_seconds = 60"]
    lines += [f'servers = ["{server}"]', f'server_key = "{KEY}"']
    for name, section in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    attempt = folder.logs / f"attempt_{len(list(folder.logs.glob('attempt_*'))) + 1}"
    attempt.mkdir(parents=True)
    (attempt / "trainer.toml").write_text("\n".join(lines) + "\n")
    return folder, attempt


def be_trainer(attempt: str) -> None:
    """The command `python -m trainer`, in a process that has its libraries already."""
    log = os.open(f"{attempt}/rank_0.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from trainer.__main__ import main

    sys.exit(main(Path(attempt, "trainer.toml"), Path(attempt)))


def start(attempt: Path) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "trainer.cli"])
    process = context.Process(target=be_trainer, args=(str(attempt),), daemon=True)
    process.start()
    return process


def exit_code(trainer: ForkServerProcess, attempt: Path) -> int:
    """Wait for the end of the process."""
    trainer.join(SECONDS)
    log = (attempt / "rank_0.log").read_text()
    assert trainer.exitcode is not None, f"the trainer did not end within {SECONDS:g} s:\n{log}"
    print(log)  # what pytest shows of a failed test
    return trainer.exitcode


async def feed(
    folder: RunFolder, trainer: ForkServerProcess, attempt: Path, messages: list[Message], signum: int = 0
) -> int:
    """Send `messages`, and the signal after the step of the last of them; returns the trainer's exit code."""
    deadline = time.monotonic() + SECONDS
    sender = FilesystemSender(folder.channel)
    try:
        for message in messages:
            await sender.send(message.sequence, encode_message(message))
        last = messages[-1].sequence
        while await sender.acknowledged() < last and trainer.is_alive():
            assert time.monotonic() < deadline, f"frame {last} was not acknowledged in {SECONDS:g} s"
            await asyncio.sleep(0.02)
        while signum and not any(entry.step == last for entry in scan(folder.steps)):
            assert time.monotonic() < deadline, f"step {last} was not saved in {SECONDS:g} s"
            await asyncio.sleep(0.02)
        if signum and trainer.pid is not None:
            os.kill(trainer.pid, signum)
        return await asyncio.to_thread(exit_code, trainer, attempt)
    finally:
        trainer.kill()
        await sender.close()


def batch(step: int) -> Message:
    return batch_message(step, [rl_sample(length, 10 * step + length) for length in (16, 9, 7, 12)])


def test_a_trainer_serves_every_version_pauses_and_goes_on_to_the_end_of_the_run(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    with weight_server() as server:
        folder, attempt = write_run(tmp_path, server.address)
        first = [batch(1), batch(2)]
        assert asyncio.run(feed(folder, start(attempt), attempt, first, signal.SIGUSR1)) == 75
        assert server.state()["version"] == 2 and server.state()["num_updates"] == 3
        assert json.loads(folder.paused.read_text())["step"] == 2

        folder, attempt = write_run(tmp_path, server.address, resume={})
        rest = [batch(3), batch(4), end_message(5)]
        assert asyncio.run(feed(folder, start(attempt), attempt, rest)) == 0
        assert server.state()["version"] == 4 and server.state()["num_updates"] == 6

        folder, attempt = write_run(tmp_path, server.address, resume={})
        assert asyncio.run(feed(folder, start(attempt), attempt, [end_message(5)])) == 0
        log = " ".join((attempt / "rank_0.log").read_text().split())  # lines may be folded
        assert "the run was complete already" in log
        # The orchestrator may have the end of the run still before it, which needs the last version.
        assert server.state()["version"] == 4 and server.state()["num_updates"] == 7

    entries = scan(folder.checkpoints)
    assert [entry.step for entry in entries] == [1, 2, 3, 4]
    for entry in entries:
        assert verify(entry.path) == []
        assert read_bytes(entry.path, "orchestrator/state.json") == snapshot_of(entry.step)
    records = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [(record["step"], record["reward/mean"]) for record in steps] == [
        (1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)
    ]  # fmt: skip
    assert all({"entropy", "mismatch_kl", "tokens/rl", "time/publish"} <= record.keys() for record in steps)
    assert [record["step"] for record in records if "eval/words/mean" in record] == [4, 4]
    assert (folder.weights / "step_4" / "model.safetensors").is_file()


def test_a_server_that_refuses_the_weights_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    with weight_server("refuses") as server:
        folder, attempt = write_run(tmp_path, server.address)
        assert exit_code(start(attempt), attempt) == 1
    record = read_exit(attempt, 0)
    assert record is not None and record.code == 1 and "version 0" in record.message
    assert scan(folder.checkpoints) == []
