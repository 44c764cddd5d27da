"""How old trained tokens are: the real orchestrator between a policy server that lags and a quick trainer."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.channel.filesystem import FilesystemReceiver
from contract.layout import RunFolder
from contract.model_files import load_tokenizer, resolve_model
from contract.policy import GenerateRequest, Origin
from contract.rollout import RolloutBatch, RunEnd, decode_message, from_wire
from contract.sections import ModelFilesConfig, SamplingConfig
from orchestrator.background import LoopLag
from orchestrator.build import build_pipeline
from orchestrator.config import OrchestratorConfig, RolloutConfig, SourceConfig
from orchestrator.progress import Snapshot
from tests.support.policy_server import PolicyServer, Reply

_MODEL = ModelFilesConfig(name=str(Path(__file__).parents[2] / "configs" / "debug" / "model"))
_ENVIRONMENT = "tests.support.environments:Checksum"
_STEPS = 30
_SLOW_SECONDS = 1.0
"""Many updates of this trainer."""


class _LaggingServer(PolicyServer):
    """Answers with six letters by the seed; one answer of twenty takes long, and all its tokens are of the
    version at its begin.
    """

    def __init__(self) -> None:
        super().__init__(self._draw, origin=Origin("0123abcd", "trainer"))
        vocabulary = load_tokenizer(_MODEL, resolve_model(_MODEL)).get_vocab()
        self._letters = [vocabulary[letter] for letter in "abcdefgh"]
        self._end = vocabulary["<|im_end|>"]

    def _draw(self, request: GenerateRequest) -> Reply:
        chance = random.Random(request.sampling.seed)
        tokens = [*chance.choices(self._letters, k=6), self._end]
        delay = _SLOW_SECONDS if chance.random() < 0.05 else 0.0
        # The version is told by the log-probabilities, too, on which the orchestrator does not decide.
        logprobs = [-float(self.version) - 1.0] * len(tokens)
        return Reply(tokens, logprobs, versions=[self.version] * len(tokens), delay_seconds=delay)


def _config(folder: Path, url: str, max_off_policy_steps: int) -> OrchestratorConfig:
    return OrchestratorConfig(
        sources=[
            SourceConfig(environment=_ENVIRONMENT, name="once"),
            SourceConfig(environment=_ENVIRONMENT, name="thrice", settings={"num_turns": 3}),
        ],
        sampling=SamplingConfig(max_tokens=8),
        rollout=RolloutConfig(
            group_size=2, groups_per_batch=2, max_lead=2, max_off_policy_steps=max_off_policy_steps
        ),
        output_dir=folder,
        run_name="run",
        max_steps=_STEPS,
        seq_len=320,
        model=_MODEL,
        servers=[url],
    )


async def _train(folder: RunFolder, server: PolicyServer) -> list[RolloutBatch]:
    """A trainer that takes no time: the next version is served as soon as its batch is there."""
    receiver = FilesystemReceiver(folder.channel, "trainer")
    batches: list[RolloutBatch] = []
    while True:
        sequence = len(batches) + 1
        frame = await asyncio.to_thread(receiver.receive, sequence, 60.0)
        assert frame is not None, f"batch {sequence} did not come within 60 s"
        message = decode_message(frame)
        receiver.acknowledge(sequence)
        if isinstance(message, RunEnd):
            receiver.close()
            return batches
        batches.append(message)
        await server.set_version(message.step)


async def _run(folder: RunFolder, max_off_policy_steps: int) -> tuple[list[RolloutBatch], int]:
    """The batches, and the draws that were given up."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(_LaggingServer())
        config = _config(folder.root.parent, server.url, max_off_policy_steps)
        pipeline = await build_pipeline(config, resolve_model(_MODEL), LoopLag(), stack)
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(_train(folder, server))
            tasks.create_task(pipeline.run())
        return training.result(), server.num_aborted


@pytest.mark.timeout(150)
@pytest.mark.parametrize("bound", [1, 2])
def test_no_trained_token_is_older_than_the_bound_and_what_is_given_up_is_counted(
    bound: int, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.run_id.write_text("0123abcd\n")
    batches, num_aborted = asyncio.run(asyncio.wait_for(_run(folder, bound), 120))
    assert len(batches) == _STEPS
    rows = _traces(folder)
    oldest: dict[int, int] = defaultdict(int)
    for row in rows:
        oldest[row["step"]] = max(oldest[row["step"]], row["step"] - 1 - row["versions"][0])
    # The lead fills the bound, and the lag would go beyond it.
    assert max(oldest.values()) == bound
    for batch in batches:
        assert _oldest_by_logprobs(batch) == oldest[batch.step] == batch.metrics["staleness/max"]
    assert num_aborted > 0
    _check_counts(batches, rows)


def _traces(folder: RunFolder) -> list[dict[str, Any]]:
    texts = [(folder.rollouts / f"step_{step}.jsonl").read_text() for step in range(1, _STEPS + 1)]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _oldest_by_logprobs(batch: RolloutBatch) -> int:
    """Age of the oldest token, from what the server drew it with."""
    ages: list[int] = []
    for sample in map(from_wire, batch.samples):
        sampled = sample.weights["rl"] > 0
        ages += [batch.step - 1 - int(-value - 1) for value in sample.streams["logprobs"][sampled]]
    return max(ages)


def _check_counts(batches: list[RolloutBatch], rows: list[dict[str, Any]]) -> None:
    """Every group that was given up is counted once, and sampled again with the next attempt."""
    dropped = sum(batch.metrics["groups/dropped_stale"] for batch in batches)
    attempts = {row["position"]: row["attempt"] for row in rows}
    assert len({(row["step"], row["position"]) for row in rows}) == len(attempts), "a group was trained twice"
    assert any(attempts.values()), "no group that was given up was sampled again"
    state = msgspec.json.decode(batches[-1].snapshot, type=Snapshot)
    waiting = sum(draw.attempt for draw in state.outstanding)
    assert sum(batch.metrics["groups/dropped"] for batch in batches) == dropped
    assert dropped == sum(attempts.values()) + waiting
