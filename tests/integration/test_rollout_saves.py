"""Saves behind the step, and ends while a batch is waited for, where batches come from a stream: the whole
trainer but for its command line, on two ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.commit import scan, verify
from contract.layout import RunFolder
from contract.store import read_bytes
from tests.support.engine import Recorder, build_sharded, rank_process, weights_of
from tests.support.ranks import run_ranks
from tests.support.stream import MemoryReceiver, batch_message, open_source, rl_sample, snapshot_of
from tests.support.tiny_model import write_tiny_model
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import plan_resume
from trainer.config.checkpoint import CheckpointConfig, ResumeConfig
from trainer.config.optimizer import AdamWConfig
from trainer.config.rl import TrustRegionLossConfig
from trainer.engine import Engine
from trainer.loop import Loop, Outcome
from trainer.objective.policy_gradient import PolicyGradient
from trainer.objective.policy_loss import build_token_loss
from trainer.optimizer.factory import build_optimizer
from trainer.parallel.process import Process
from trainer.parallel.stop import Requests
from trainer.parts import DataPart, ModelPart, SnapshotCompanion, StatePart
from trainer.publish.base import NoPublisher
from trainer.state import TrainState

CONFIG: dict[str, Any] = {"seed": 0}
COMPANION = "orchestrator"


class Trainer:
    """A rank of an RL run whose optimizer lives on the host, and that saves every step behind the next."""

    def __init__(
        self, model_folder: str, folder: RunFolder, process: Process, receiver: MemoryReceiver
    ) -> None:
        self.process, self.folder, self.receiver = process, folder, receiver
        self.state, self.requests, self.recorder = TrainState(), Requests(), Recorder()
        self.source = open_source(receiver, process, self.state, timeout_seconds=30.0)
        self.model = build_sharded(model_folder, process)
        self.optimizer = build_optimizer(
            AdamWConfig(lr=3e-3),
            self.model.run_parameters(),
            block_parameters=self.model.block_parameters(),
            offload="optimizer",
            chunk_bytes=10_000,
            process=process,
        )
        self.parts = {
            "model": ModelPart(self.model, self.optimizer),
            "optimizer": self.optimizer,
            "schedule": StatePart.schedule(self.state),
            "progress": StatePart.progress(self.state),
            "data": DataPart(self.source),
        }

    def fit(self, total_steps: int, resume: ResumeConfig | None = None) -> Outcome:
        config = CheckpointConfig(interval=1, async_save=True)
        with CheckpointManager(
            config,
            self.folder,
            self.process,
            self.parts,
            CONFIG,
            state_owners=[self.optimizer],
            is_state_on_host=True,
            companions={COMPANION: SnapshotCompanion(self.source)},
        ) as checkpoint:
            if resume is not None:
                plan = plan_resume(resume, self.folder, self.process, CONFIG, companions=(COMPANION,))
                assert plan is not None
                checkpoint.load(plan)
            loop = Loop(
                process=self.process,
                engine=Engine(
                    self.model,
                    self.optimizer,
                    PolicyGradient(self.model.vocab_size, build_token_loss(TrustRegionLossConfig())),
                    self.process.device,
                    is_varlen=True,
                    max_grad_norm=1.0,
                ),
                source=self.source,
                publisher=NoPublisher(),
                checkpoint=checkpoint,
                hooks=[],
                reporter=self.recorder,
                requests=self.requests,
                state=self.state,
                schedule=lambda n: 1.0 / n,
                total_steps=total_steps,
                on_non_finite="stop",
            )
            outcome = loop.fit()
        self.optimizer.close()
        return outcome


def frames(*steps: int) -> Mapping[int, Any]:
    lengths = (16, 9, 7, 12, 10)
    return {
        step: batch_message(
            step, [rl_sample(length, 10 * step + number) for number, length in enumerate(lengths)]
        )
        for step in steps
    }


def end_and_go_on(model_folder: str, root: str, request: str) -> dict[str, Any]:
    """A run that is asked to end while it waits for its fourth batch, what goes on from there, and one that
    never stopped.
    """
    process, folder = rank_process(), RunFolder(Path(root) / "run")
    first = Trainer(model_folder, folder, process, MemoryReceiver(frames(1, 2, 3)))

    def ask(sequence: int) -> None:
        if request == "SIGTERM":
            first.requests.receive(signal.SIGTERM, None)
        else:
            first.requests.receive_pause(signal.SIGUSR1, None)

    # Rank 0 alone reads the channel, and one rank's request is that of all.
    first.receiver.on_missing = ask
    outcome = first.fit(6)
    second = Trainer(model_folder, folder, process, MemoryReceiver(frames(4, 5, 6)))
    rest = second.fit(6, ResumeConfig())
    whole = Trainer(
        model_folder, RunFolder(Path(root) / "whole"), process, MemoryReceiver(frames(*range(1, 7)))
    )
    whole.fit(6)
    expected, found = weights_of(whole.model), weights_of(second.model)
    losses = [[step["loss"] for step in trainer.recorder.steps] for trainer in (first, second, whole)]
    return {
        "outcome": (outcome.steps_done, outcome.ending, outcome.exit_code),
        "rest": (rest.steps_done, rest.exit_code),
        "losses": losses,
        "is_equal": all((expected[name] == found[name]).all() for name in expected),
    }


@pytest.mark.parametrize(("request_name", "code"), [("SIGTERM", 143), ("SIGUSR1", 75)])
def test_a_run_that_ends_while_it_waits_for_a_batch_goes_on_as_if_it_had_not_ended(
    request_name: str, code: int, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model")
    for found in run_ranks(end_and_go_on, 2, str(model), str(tmp_path), request_name):
        assert found["outcome"] == (3, request_name, code)
        assert found["rest"] == (3, 0)
        first, second, whole = found["losses"]
        assert first + second == whole and len(set(whole)) == 6
        assert found["is_equal"]
    entries = scan(tmp_path / "run" / "checkpoints")
    assert [entry.step for entry in entries] == [1, 2, 3, 4, 5, 6]
    for entry in entries:
        assert entry.record is not None and entry.record.components == ["trainer", "orchestrator"]
        assert read_bytes(entry.path, "orchestrator/state.json") == snapshot_of(entry.step)
        assert verify(entry.path) == []
