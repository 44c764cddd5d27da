"""Where a test runs `sft`, and what it reads from a run folder."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.commit import scan, verify
from contract.layout import RunFolder
from contract.store import Folder
from telemetry.metrics import read_metrics
from tests.support.runs import Command, Finished, Nursery, Rank
from tests.support.tiny_model import write_tiny_model

if TYPE_CHECKING:
    import torch

LETTERS = "abcdefghij"
NUM_COUNTABLE = 5


def write_model(folder: Path, *, dropout: float) -> Path:
    """A tiny model with attention dropout, by which a run shows whether its random generators went on."""
    write_tiny_model(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": dropout}))
    return folder


def conversation(question: str, answer: str) -> dict[str, Any]:
    """One row of chat data."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, count: int, *, seed: int) -> Path:
    """`count` conversations, no two of the same length, so that the tokens of a step tell its rows."""
    drawn = random.Random(seed)
    lengths = drawn.sample(range(1, 3 * count), count)
    rows = []
    for length in lengths:
        word = "".join(drawn.choices(LETTERS, k=length))
        rows.append(conversation(word, word[::-1][:8]))
    return write_jsonl(path, rows)


def write_countable_rows(path: Path) -> Path:
    """Five conversations whose lengths are a constant plus a power of 3: see `rows_of_step`."""
    return write_jsonl(path, [conversation("a" * 3**power, "b") for power in range(NUM_COUNTABLE)])


def rows_by_step(records: Mapping[int, Mapping[str, Any]], total_tokens: int) -> list[dict[int, int]]:
    """How often each of the countable rows was in each update, told from its numbers of samples and tokens.

    Args:
        total_tokens: of all countable rows, as the tokenizer counts them.
    """
    constant, rest = divmod(total_tokens - sum(3**power for power in range(NUM_COUNTABLE)), NUM_COUNTABLE)
    assert rest == 0
    found, samples_before = [], 0
    for _, record in sorted(records.items()):
        samples = record["total_samples"] - samples_before
        samples_before = record["total_samples"]
        left, counts = record["step_tokens"] - samples * constant, {}
        for power in range(NUM_COUNTABLE):
            left, counts[power] = divmod(left, 3)
        assert left == 0
        assert sum(counts.values()) == samples
        found.append({row: count for row, count in counts.items() if count})
    return found


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """One JSON value a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Place:
    """One folder with runs in it. Options are dotted keys with `_` as in the configuration."""

    def __init__(self, root: Path, shared: Path, nursery: Nursery) -> None:
        self.root = root
        self.shared = shared
        self.nursery = nursery
        self.output_dir = root / "out"
        self.environment: dict[str, str] = {}
        """Variables that the runs of this place get beside the usual ones."""
        self.defaults: dict[str, Any] = {
            "model.name": shared / "model",
            "data.path": shared / "train.jsonl",
            "data.seq_len": 128,
            "data.batch_size": 4,
            "data.micro_batch_size": 2,
            "data.packing": False,
            "optimizer.lr": 0.01,
            "deployment.num_threads": 1,
            "log.peak_tflops": 1.0,
            "export": None,
        }

    def folder(self, name: str = "sft") -> RunFolder:
        """The run folder of the run with this name."""
        return RunFolder(self.output_dir / name)

    def arguments(self, name: str = "sft", *flags: str, **options: Any) -> list[str]:
        """Words of the command line; a dot in an option's name is written `__`, None removes a default."""
        chosen = {**self.defaults, "output_dir": self.output_dir, "run_name": name}
        chosen |= {key.replace("__", "."): value for key, value in options.items()}
        if any(key.startswith("export.") for key in chosen):
            del chosen["export"]
        return [*(word for key, value in chosen.items() for word in _words(key, value)), *flags]

    def start(self, name: str = "sft", *flags: str, world_size: int = 1, **options: Any) -> list[Rank]:
        """Begin a run in forked processes."""
        arguments = self.arguments(name, *flags, **options)
        return self.nursery.start(arguments, world_size=world_size, environment=self.environment)

    def run(
        self,
        name: str = "sft",
        *flags: str,
        world_size: int = 1,
        file_size_limit: int | None = None,
        **options: Any,
    ) -> Finished:
        """A run in forked processes, from start to end."""
        arguments = self.arguments(name, *flags, **options)
        return self.nursery.run(
            arguments,
            world_size=world_size,
            file_size_limit=file_size_limit,
            environment=self.environment,
        )

    def train(self, name: str = "sft", *flags: str, world_size: int = 1, **options: Any) -> Finished:
        """`run`, which must succeed."""
        finished = self.run(name, *flags, world_size=world_size, **options)
        assert finished.code == 0, finished.output
        return finished

    def command(self, name: str = "sft", *flags: str, **options: Any) -> Command:
        """Begin the true command `sft`."""
        program = Path(sys.executable).with_name("sft")
        words = [program, *self.arguments(name, *flags, **options)]
        return Command(words, {**self.nursery.environment, **self.environment}, self.root)

    def metrics(self, name: str = "sft") -> dict[int, dict[str, Any]]:
        """Metrics by step, each step as its last attempt saw it."""
        return {record["step"]: record for record in read_metrics(self.folder(name).metrics)}

    def committed(self, name: str = "sft") -> list[int]:
        """Steps that can be loaded; every one of them must be whole, file by file."""
        entries = [entry for entry in scan(self.folder(name).checkpoints) if entry.state == "committed"]
        for entry in entries:
            assert verify(entry.path) == []
        return [entry.step for entry in entries]

    def checkpoint(self, name: str, step: int) -> Path:
        """The folder of a step."""
        return self.folder(name).checkpoints / f"step_{step}"

    def state(self, name: str, step: int) -> dict[str, Any]:
        """The values without tensors of a step: progress, schedule, data position, optimizer options."""
        return json.loads((self.checkpoint(name, step) / "trainer" / "state.json").read_text())


def _words(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is None:
        return [f"--no-{key}"] if key in ("export", "ckpt", "sample", "validation") else []
    if isinstance(value, bool):
        return [flag if value else f"--no-{key.replace('_', '-')}"]
    if isinstance(value, list | dict):
        return [flag, json.dumps(value)]
    return [flag, str(value)]


@functools.cache
def tensors_of(path: Folder) -> Mapping[str, torch.Tensor]:
    """Every tensor of a step folder (weights, optimizer, random generators), whole, by `<part>.<name>`."""
    from trainer.checkpoint.reader import read_tensors

    return {
        f"{part}.{name}": tensor
        for part in ("model", "optimizer", "rng")
        for name, tensor in read_tensors(path, part).items()
    }


def assert_same_tensors(first: Folder, second: Folder) -> None:
    """Two step folders hold the same tensors, bit for bit."""
    import torch

    one, two = tensors_of(first), tensors_of(second)
    assert one.keys() == two.keys()
    assert {name.partition(".")[0] for name in one} == {"model", "optimizer", "rng"}
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert different == []


TRAINED = ("loss", "grad_norm", "lr", "epoch", "step_tokens", "tokens/ce", "total_tokens", "total_samples")
"""Metrics that follow from what was trained, and from nothing else."""


def trained(records: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Those metrics by step."""
    return {
        step: {key: record[key] for key in TRAINED}
        for step, record in sorted(records.items())
        if "loss" in record
    }
