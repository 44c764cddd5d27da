"""One policy server that no run owns, and several runs after each other: the real publishers, receivers,
engine and client; of the orchestrator and the trainer's loop only what they say to the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from contract.errors import PolicyServerError, PublishError
from contract.layout import RunFolder
from contract.policy import NOBODY, Origin, Sampling, VersionInfo
from contract.sections import ModelFilesConfig
from inference.config import InferenceConfig
from inference.engine.build import build_engine
from inference.receive.build import WeightReceiver
from orchestrator.client import PolicyClient
from tests.support.engine import group_of_one
from tests.support.tiny_model import write_tiny_model
from tests.unit.inference.serving import serve
from trainer.config.rl import RLTrainConfig
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process
from trainer.publish.base import Publisher
from trainer.publish.build import build_publisher

PROMPT = [1, 70, 71, 2, 1]
SAMPLING = Sampling(temperature=0.0, max_tokens=6)


class Trainer:
    """A start of a trainer. The weights of version v are those of seed `seed + v`, so a run that goes on has
    those of its earlier attempt.
    """

    def __init__(self, run_id: str, name: str, seed: int, models: Path, process: Process) -> None:
        self.origin = Origin(run_id, name)
        self._seed = seed
        self._models = models
        self._process = process
        self._weights: dict[str, LogicalTensor] = {}
        self._publisher: Publisher | None = None

    def model(self, version: int) -> Path:
        folder = self._models / str(self._seed + version)
        return folder if folder.exists() else write_tiny_model(folder, tie=False, seed=self._seed + version)

    def publish(self, version: int, kind: str, server: str, root: Path) -> None:
        if self._publisher is None:
            section = {"type": kind, "timeout_seconds": 20.0}
            config = RLTrainConfig.model_validate(
                {"model": {"name": "unused"}, "max_steps": 1, "publish": section, "servers": [server]}
            )
            self._publisher = build_publisher(
                config, self._process, RunFolder(root), self._now, origin=self.origin, dtype=torch.float32
            )
        tensors = load_file(self.model(version) / "model.safetensors")
        self._weights = {name: LogicalTensor.replicated(tensor) for name, tensor in tensors.items()}
        self._publisher.publish(version)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _now(self) -> Mapping[str, LogicalTensor]:
        return self._weights


def greedy(folder: Path) -> list[int]:
    """What the model of `folder` finds most likely, without a cache."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(SAMPLING.max_tokens):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("kind", ["filesystem", "collective"])
def test_runs_follow_each_other_on_one_server_each_with_tokens_of_its_own_weights(
    kind: str, tmp_path: Path
) -> None:
    with group_of_one() as process:
        _follow_each_other(kind, tmp_path, process)


def _follow_each_other(kind: str, tmp_path: Path, process: Process) -> None:
    def trainer(run_id: str, name: str, seed: int) -> Trainer:
        return Trainer(run_id, name, seed, tmp_path / "models", process)

    first, other, again = trainer("a", "t1", 10), trainer("b", "t2", 20), trainer("a", "t3", 10)

    async def check() -> None:
        folder = write_tiny_model(tmp_path / "loaded", tie=False, seed=0)
        engine = build_engine(
            InferenceConfig(model=ModelFilesConfig(name=str(folder)), device="cpu", num_threads=1, max_len=64)
        )
        receiver = WeightReceiver(engine.device)
        async with (
            serve(engine, open_update=receiver.open_update) as server,
            PolicyClient([server.url], run_id="a") as of_a,
            PolicyClient([server.url], run_id="b") as of_b,
        ):
            assert await of_a.weights() == {server.url: VersionInfo(0, NOBODY, 64)}
            for one, versions in ((first, (0, 1, 2, 3)), (other, (0, 1)), (again, (2, 3))):
                own, stranger = (of_a, of_b) if one.origin.run_id == "a" else (of_b, of_a)
                for version in versions:
                    root = tmp_path / one.origin.run_id
                    await asyncio.to_thread(one.publish, version, kind, server.url, root)
                    assert await own.weights() == {server.url: VersionInfo(version, one.origin, 64)}
                    answer = await own.generate(PROMPT, SAMPLING, "r")
                    assert answer.versions == [version] * SAMPLING.max_tokens
                    assert answer.tokens == greedy(one.model(version)), (one.origin, version)
                with pytest.raises(PolicyServerError, match=f"of run {one.origin.run_id}"):
                    await stranger.generate(PROMPT, SAMPLING, "r")
                with pytest.raises(PolicyServerError, match=f"of run {one.origin.run_id}"):
                    await stranger.wait_for_version(0, 0)
            with pytest.raises(PublishError, match="a trainer of run b, which run a has replaced here"):
                await asyncio.to_thread(other.publish, 2, kind, server.url, tmp_path / "b")
        receiver.close()

    try:
        asyncio.run(asyncio.wait_for(check(), 120))
    finally:
        for one in (first, other, again):
            one.close()
    assert greedy(first.model(2)) != greedy(first.model(3)) != greedy(other.model(1)), "nothing to tell apart"
