"""A sharded engine from a tiny model folder, inside a rank or in a group of one, and data to train it on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from contract.batch import MicroBatch, Sample, StepBatch, build_micro_batch
from contract.layout import RunFolder
from contract.model_files import resolve_model
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.model import ModelConfig, Offload
from trainer.config.optimizer import AdamWConfig, OptimizerConfig
from trainer.engine import Engine
from trainer.hooks.base import Hook
from trainer.loop import Loop
from trainer.model.build import build_model
from trainer.model.causal_lm import CausalLM
from trainer.objective.base import Objective
from trainer.objective.cross_entropy import CrossEntropy
from trainer.optimizer.factory import build_optimizer
from trainer.parallel.device import Device
from trainer.parallel.mesh import build_mesh
from trainer.parallel.process import Process, open_process
from trainer.parallel.shard import shard_model
from trainer.parallel.stop import Requests
from trainer.publish.base import NoPublisher
from trainer.state import TrainState

Array = npt.NDArray[Any]


def rank_process() -> Process:
    """The process of a rank that `run_ranks` started."""
    timeout = timedelta(seconds=60)
    control, background = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    assert isinstance(control, dist.ProcessGroup) and isinstance(background, dist.ProcessGroup)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = Device(torch.device("cpu"))
    return Process(rank, rank, world_size, world_size, device, timeout, control, background, timeout)


@contextmanager
def group_of_one() -> Iterator[Process]:
    """A group of one in this process, on the CPU; only one can be open at a time."""
    with open_process("cpu", num_threads=1, timeout_seconds=60) as process:
        yield process


def in_new_process(function: Any, *arguments: Any, timeout: float = 60.0) -> Any:
    """Result of a module-level function in a process of its own, without any group."""
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        return pool.submit(function, *arguments).result(timeout)


def build_sharded(
    folder: Path | str,
    process: Process,
    *,
    dp_replicate: int = 1,
    seed: int = 0,
    compute_dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> CausalLM:
    """The model of `folder` as a run would build it; `settings` are fields of the model section."""
    config = ModelConfig(name=str(folder), **settings)
    shard = functools.partial(
        shard_model,
        mesh=build_mesh(process, dp_replicate),
        compute_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        reshard_after_forward=config.reshard_after_forward,
    )
    device = torch.device("cpu")
    return build_model(config, resolve_model(config), device, shard, seed=seed, compute_dtype=compute_dtype)


def build_engine(
    model: CausalLM,
    process: Process,
    *,
    optimizer: OptimizerConfig | None = None,
    objective: Objective | None = None,
    is_varlen: bool = True,
    offload: Offload = "none",
    chunk_mib: float = 256.0,
) -> Engine:
    """An engine over `model`, AdamW with lr 3e-3 by default; clips as the optimizer's section says."""
    section = optimizer or AdamWConfig(lr=3e-3)
    built = build_optimizer(
        section,
        model.run_parameters(),
        block_parameters=model.block_parameters(),
        offload=offload,
        chunk_bytes=int(chunk_mib * 2**20),
        process=process,
    )
    model.masters.clear()
    return Engine(
        model,
        built,
        objective or CrossEntropy(model.vocab_size),
        process.device,
        is_varlen=is_varlen,
        max_grad_norm=section.max_grad_norm,
    )


def sample(tokens: Sequence[int], num_prompt: int = 1, sample_id: int = 0) -> Sample:
    """Tokens of which the first `num_prompt` carry no loss."""
    weights = np.ones(len(tokens), np.float32)
    weights[:num_prompt] = 0.0
    return Sample(np.asarray(tokens, np.int64), {"ce": weights}, sample_id)


def micro_batches(
    rows: Sequence[Sequence[Sample]], process: Process, micro_batch_size: int
) -> list[MicroBatch]:
    """This rank's share of `rows`, `micro_batch_size` rows at a time; equally many on every rank."""
    mine = list(rows[process.rank :: process.world_size])
    mine += [[] for _ in range(-(-len(rows) // process.world_size) - len(mine))]
    starts = range(0, len(mine), micro_batch_size)
    return [build_micro_batch(mine[start : start + micro_batch_size], components=["ce"]) for start in starts]


def step_batch(
    rows: Sequence[Sequence[Sample]], process: Process, micro_batch_size: int = 1, epoch: float = 0.0
) -> StepBatch:
    """This rank's batch of one update over `rows`."""
    parts = micro_batches(rows, process, micro_batch_size)
    return StepBatch(parts, sum(len(row) for row in rows), epoch)


def whole(tensor: torch.Tensor) -> Array:
    """The full tensor; collective if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().numpy().copy()


def weights_of(model: CausalLM) -> dict[str, Array]:
    """Full weights by run-time name."""
    return {name: whole(item.parameter) for name, item in model.run_parameters().items()}


def gradients_of(model: CausalLM) -> dict[str, Array]:
    """Full gradients by name; parameters without one are left out."""
    found = {name: item.parameter.grad for name, item in model.run_parameters().items()}
    return {name: whole(item) for name, item in found.items() if item is not None}


def difference(left: Mapping[str, Array], right: Mapping[str, Array]) -> float:
    """Largest difference of any element; the names must be the same."""
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


class ListSource:
    """Hands out given batches, then None."""

    def __init__(self, batches: Sequence[StepBatch | None]) -> None:
        self._batches = batches
        self.position = 0

    @property
    def steps_left(self) -> int | None:
        return len(self._batches) - self.position

    def next_step(self) -> StepBatch | None:
        if self.position >= len(self._batches):
            return None
        self.position += 1
        return self._batches[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]

    def summary(self) -> dict[str, str]:
        return {}


class Recorder:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.beside: list[dict[str, Any]] = []

    def report(self, state: TrainState, values: Mapping[str, Any], batch: StepBatch | None) -> None:
        record = {"step": state.step, **values}
        (self.steps if batch is not None else self.beside).append(record)


def train(
    engine: Engine, process: Process, batches: Sequence[StepBatch], *, hooks: Sequence[Hook] = ()
) -> tuple[list[dict[str, Any]], TrainState]:
    """Run the real loop over `batches` without checkpoints; metrics of every step, and the counters."""
    recorder, state = Recorder(), TrainState()
    loop = Loop(
        process=process,
        engine=engine,
        source=ListSource(batches),
        publisher=NoPublisher(),
        checkpoint=CheckpointManager(None, RunFolder(Path("unused")), process, {}, {}),
        hooks=hooks,
        reporter=recorder,
        requests=Requests(),
        state=state,
        schedule=lambda n: 1.0 / n,
        total_steps=len(batches),
        on_non_finite="skip",
    )
    loop.fit()
    return recorder.steps, state
