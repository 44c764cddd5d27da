"""The proof that there is one loop: the same samples, from a data set and from a stream of rollouts, train
the same model to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contract.batch import Sample
from contract.layout import RunFolder
from tests.support.engine import (
    Array,
    Recorder,
    build_engine,
    build_sharded,
    difference,
    rank_process,
    weights_of,
)
from tests.support.ranks import run_ranks
from tests.support.stream import MemoryReceiver, batch_message, end_message, open_source
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.data import FakeDataConfig
from trainer.config.model import Offload
from trainer.config.rl import TrustRegionLossConfig
from trainer.hooks.run_end import RunEndHook
from trainer.loop import Loop
from trainer.objective.base import Objective
from trainer.objective.cross_entropy import CrossEntropy
from trainer.objective.policy_gradient import PolicyGradient
from trainer.objective.policy_loss import build_token_loss
from trainer.parallel.process import Process
from trainer.parallel.stop import Requests
from trainer.publish.base import NoPublisher
from trainer.source.base import Source
from trainer.source.fake import FakeRows, FakeSource
from trainer.source.stream import StreamSource
from trainer.state import TrainState

VOCAB_SIZE, NUM_STEPS = 90, 3
DATA = FakeDataConfig(num_rows=24, seq_len=12, batch_size=8, micro_batch_size=2)


@dataclass(frozen=True)
class Variant:
    num_ranks: int
    offload: Offload = "none"
    fusions: tuple[str, ...] = ()


VARIANTS = {
    "1 rank": Variant(1),
    "2 ranks": Variant(2),
    "2 ranks, full offload, fused": Variant(2, "full", ("qkv", "gate_up")),
    "4 ranks, optimizer on the host": Variant(4, "optimizer"),
}


def open_dataset(process: Process) -> Source:
    place = {"rank": process.rank, "world_size": process.world_size}
    return FakeSource(DATA, vocab_size=VOCAB_SIZE, seed=5, max_epochs=1, **place)


def open_stream(process: Process, state: TrainState) -> StreamSource:
    rows = FakeRows(DATA, vocab_size=VOCAB_SIZE, seed=5)

    def samples(step: int) -> list[Sample]:
        numbers = range(DATA.batch_size * (step - 1), DATA.batch_size * step)
        return [sample for number in numbers for sample in rows.samples(number)]

    steps = range(1, NUM_STEPS + 1)
    frames = {step: batch_message(step, samples(step)) for step in steps}
    receiver = MemoryReceiver({**frames, NUM_STEPS + 1: end_message(NUM_STEPS + 1)})
    return open_source(receiver, process, state, seq_len=DATA.seq_len, micro_batch_size=DATA.micro_batch_size)


def train(
    folder: str, process: Process, variant: Variant, *, from_stream: bool
) -> tuple[Recorder, dict[str, Array]]:
    """What the loop reports, and the weights that it leaves."""
    state, recorder, requests = TrainState(), Recorder(), Requests()
    model = build_sharded(folder, process, fusions=list(variant.fusions))
    source: Source = open_dataset(process)
    objective: Objective = CrossEntropy(model.vocab_size)
    hooks = []
    if from_stream:
        source = stream = open_stream(process, state)
        objective = PolicyGradient(model.vocab_size, build_token_loss(TrustRegionLossConfig()))
        hooks = [RunEndHook(stream, process, requests)]
    Loop(
        process=process,
        engine=build_engine(model, process, objective=objective, offload=variant.offload, chunk_mib=0.01),
        source=source,
        publisher=NoPublisher(),
        checkpoint=CheckpointManager(None, RunFolder(Path("unused")), process, {}, {}),
        hooks=hooks,
        reporter=recorder,
        requests=requests,
        state=state,
        schedule=lambda n: 1.0 / n,
        total_steps=NUM_STEPS,
        on_non_finite="stop",
    ).fit()
    return recorder, weights_of(model)


def train_both(folder: str, variant: Variant) -> list[Any]:
    """Steps from the data set and from the stream, the largest difference of a weight, and the last words of
    the stream.
    """
    process = rank_process()
    dataset, expected = train(folder, process, variant, from_stream=False)
    stream, found = train(folder, process, variant, from_stream=True)
    return [dataset.steps, stream.steps, difference(expected, found), stream.beside]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_samples_from_a_data_set_and_from_a_stream_train_bit_for_bit_alike(
    name: str, tiny_llama: Path
) -> None:
    variant = VARIANTS[name]
    for dataset, stream, weight_difference, beside in run_ranks(
        train_both, variant.num_ranks, str(tiny_llama), variant
    ):
        assert [step["step"] for step in dataset] == [step["step"] for step in stream] == [1, 2, 3]
        for key in ("loss", "grad_norm", "lr_factor", "step_tokens", "total_samples", "tokens/ce"):
            assert [step[key] for step in dataset] == [step[key] for step in stream], key
        assert stream[0]["loss"] != stream[1]["loss"]
        assert weight_difference == 0.0
        assert [step["reward/mean"] for step in stream] == [1 / 8, 2 / 8, 3 / 8]
        assert beside == [{"step": 3, "eval/words/mean": 0.75}]
