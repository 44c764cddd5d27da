"""The orchestrator as a process: from a configuration file to an exit code and its record."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.attempt import read_exit
from contract.channel.filesystem import FilesystemReceiver
from contract.layout import RunFolder
from contract.policy import GenerateRequest, Origin
from contract.rollout import RolloutBatch, RunEnd, decode_message, from_wire
from contract.sections import ModelFilesConfig, SamplingConfig
from contract.settings.dump import to_toml
from orchestrator.config import EvaluationConfig, OrchestratorConfig, RolloutConfig, SourceConfig
from tests.support.gguf_file import write_endless_conversion
from tests.support.policy_server import PolicyServer, Reply
from tests.support.runs import wait_until
from tests.support.tiny_model import write_tiny_tokenizer

_ENVIRONMENT = """
from orchestrator.environment.base import Environment

class Longer(Environment):
    def __len__(self):
        return 10

    def task(self, index):
        return {"word": "abc"[index % 3]}

    def start(self, task):
        return [{"role": "user", "content": task["word"]}]

    def reward(self, task, messages, state):
        return float(len(messages[-1]["content"]))
"""
_SLOW_ENVIRONMENT = """
import os, time
from pathlib import Path
from orchestrator.environment.base import Environment

class Longer(Environment):
    def __init__(self):
        Path("worker.tmp").write_text(str(os.getpid()))
        Path("worker.tmp").rename("worker.pid")
        time.sleep(3600)
"""
_TOKEN = 40  # of the tiny tokenizer, one byte
_END = 2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a tokenizer, an environment and the folder of a run."""
    (tmp_path / "model").mkdir()
    write_tiny_tokenizer(tmp_path / "model")
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "longer.py").write_text(_ENVIRONMENT)
    folder = RunFolder(tmp_path / "out/run")
    (folder.logs / "attempt_1").mkdir(parents=True)
    folder.run_id.write_text("0123abcd\n")
    return tmp_path


def _start(
    root: Path, server: str, *, environment: Mapping[str, str] | None = None, **values: Any
) -> subprocess.Popen[str]:
    config = OrchestratorConfig(
        **{
            "sources": [SourceConfig(environment="longer:Longer")],
            "sampling": SamplingConfig(max_tokens=8),
            "rollout": RolloutConfig(group_size=2, groups_per_batch=2, max_lead=0),
            "evaluation": EvaluationConfig(
                sources=[SourceConfig(environment="longer:Longer", name="held")], num_tasks=2
            ),
            "output_dir": root / "out",
            "run_name": "run",
            "max_steps": 2,
            "seq_len": 64,
            "model": ModelFilesConfig(name=str(root / "model")),
            "servers": [server],
            **values,
        }
    )
    path = root / "orchestrator.toml"
    path.write_text(to_toml(config, header="test"))
    command = [sys.executable, "-m", "orchestrator", str(path), str(root / "out/run/logs/attempt_1")]
    return subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def _answer(request: GenerateRequest) -> Reply:
    """One to four tokens, by the seed."""
    return Reply([*[_TOKEN] * ((request.sampling.seed or 0) % 4), _END])


def _attempt(root: Path) -> Path:
    return root / "out/run/logs/attempt_1"


async def _train(receiver: FilesystemReceiver, server: PolicyServer) -> list[RolloutBatch | RunEnd]:
    """A trainer that only counts versions."""
    messages: list[RolloutBatch | RunEnd] = []
    while not (messages and isinstance(messages[-1], RunEnd)):
        sequence = len(messages) + 1
        frame = await asyncio.to_thread(receiver.receive, sequence, 60.0)
        assert frame is not None
        messages.append(decode_message(frame))
        receiver.acknowledge(sequence)
        if isinstance(messages[-1], RolloutBatch):
            await server.set_version(sequence)
    return messages


def test_a_run_from_its_configuration_to_the_trainers_farewell(root: Path) -> None:
    mapped: list[str] = []

    async def main() -> tuple[list[RolloutBatch | RunEnd], int, str]:
        def answer(request: GenerateRequest) -> Reply:
            mapped.append(Path(f"/proc/{process.pid}/maps").read_text() if not mapped else "")
            return _answer(request)

        async with PolicyServer(answer, origin=Origin("0123abcd", "trainer")) as server:
            process = _start(root, server.url)
            try:
                receiver = FilesystemReceiver(RunFolder(root / "out/run").channel, "trainer")
                messages = await _train(receiver, server)
                output, _ = await asyncio.to_thread(process.communicate, timeout=60)
            finally:
                process.kill()
            return messages, process.returncode, output

    messages, code, output = asyncio.run(asyncio.wait_for(main(), 120))
    assert code == 0, output
    assert "tokenizers" in mapped[0] and "libtorch" not in mapped[0]  # which are 0.6 GB and seconds
    status = json.loads((_attempt(root) / "orchestrator.status.json").read_text())
    assert status.keys() == {"batch", "version", "groups in flight", "episodes"}
    assert 1 <= status["batch"] <= 2 and 0 <= status["version"] <= 2
    *batches, end = messages
    assert [message.run_id for message in messages] == ["0123abcd"] * 3
    for batch in batches:
        assert isinstance(batch, RolloutBatch)
        assert batch.metrics["environment/workers_replaced"] == batch.metrics["requests/retried"] == 0.0
    assert isinstance(end, RunEnd) and end.metrics["eval/version"] == 2.0
    for batch in batches:
        assert isinstance(batch, RolloutBatch)
        assert batch.newest_version == batch.oldest_version == batch.step - 1
        for sample in map(from_wire, batch.samples):
            sampled = sample.weights["rl"] == 1
            assert set(sample.tokens[sampled]) <= {_TOKEN, _END} and sample.tokens[sampled][-1] == _END
        path = root / f"out/run/rollouts/step_{batch.step}.jsonl"
        assert len(path.read_text().splitlines()) == batch.num_episodes
    assert "Held-out tasks" in output and "held/mean" in output
    record = read_exit(_attempt(root), "orchestrator")
    assert record is not None and (record.code, record.message) == (0, "")


def test_a_signal_while_the_model_is_converted_ends_it_at_once(root: Path) -> None:
    (root / "tiny.gguf").touch()
    endless, begun = write_endless_conversion(root / "endless")
    process = _start(
        root,
        "http://127.0.0.1:9",
        environment={**endless, "XDG_CACHE_HOME": str(root / "cache")},
        model=ModelFilesConfig(name=str(root / "tiny.gguf")),
    )
    _wait_for(begun)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    record = read_exit(_attempt(root), "orchestrator")
    assert record is not None and process.returncode == record.code == 143
    assert [*(root / "cache/tailrace/models").iterdir()] == []


def test_a_run_without_an_id_is_refused(root: Path) -> None:
    RunFolder(root / "out/run").run_id.unlink()
    process = _start(root, "http://127.0.0.1:9")
    output, _ = process.communicate(timeout=60)
    record = read_exit(_attempt(root), "orchestrator")
    assert record is not None and process.returncode == record.code == 2
    assert "by which the processes of an RL run know each other" in record.message
    assert record.message in " ".join(output.split())


def _wait_for(path: Path) -> None:
    wait_until(path.exists, str(path))


def test_a_signal_while_it_begins_is_recorded(root: Path) -> None:
    process = _start(root, "http://127.0.0.1:9")
    _wait_for(_attempt(root) / "orchestrator.pid")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    record = read_exit(_attempt(root), "orchestrator")
    assert record is not None and process.returncode == record.code == 130
    assert record.message == "ended by SIGINT"


def test_a_signal_ends_it_at_once_and_leaves_no_worker(root: Path) -> None:
    (root / "longer.py").write_text(_SLOW_ENVIRONMENT)
    process = _start(root, "http://127.0.0.1:9")
    _wait_for(root / "worker.pid")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    record = read_exit(_attempt(root), "orchestrator")
    assert record is not None and process.returncode == record.code == 143
    assert record.message == "ended by SIGTERM"
    assert not Path(f"/proc/{int((root / 'worker.pid').read_text())}").exists()


def test_a_configuration_that_is_wrong_is_recorded(root: Path) -> None:
    path = root / "orchestrator.toml"
    path.write_text("max_steps = 0\n")
    command = [sys.executable, "-m", "orchestrator", str(path), str(_attempt(root))]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    text = (_attempt(root) / "orchestrator.exit.json").read_text()
    assert result.returncode == json.loads(text)["code"] == 2
    assert "max_steps" in json.loads(text)["message"]
