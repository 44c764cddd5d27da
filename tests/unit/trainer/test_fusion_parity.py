"""Fused projections against a plain transformers + torch loop, and checkpoints across a switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contract.batch import Sample
from contract.layout import RunFolder
from contract.model_files import load_tokenizer, resolve_model
from tests.support.engine import (
    Array,
    build_engine,
    build_sharded,
    difference,
    rank_process,
    sample,
    step_batch,
    train,
    whole,
)
from tests.support.ranks import run_ranks
from tests.support.resume import planned
from tests.support.tiny_model import write_tiny_model
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.reader import read_tensors
from trainer.config.checkpoint import CheckpointConfig, ExportConfig, ResumeConfig
from trainer.config.model import ModelConfig
from trainer.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig
from trainer.engine import Engine
from trainer.hooks.export import ExportHook
from trainer.model.causal_lm import CausalLM
from trainer.parallel.process import Process
from trainer.parts import ModelPart
from trainer.state import TrainState

FAMILIES = ["llama", "qwen2", "qwen3"]
NUM_STEPS = 10
# EPS is far above the rounding of a gradient: Adam would turn rounding into steps of full size.
LR, WEIGHT_DECAY, BETAS, EPS, MAX_NORM = 3e-3, 0.1, (0.9, 0.95), 1e-5, 0.5
FUSED: dict[str, Any] = {"fusions": ["qkv", "gate_up"]}
ON_DIM1: dict[str, Any] = {**FUSED, "shard_fused_on_dim1": True}
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": "block"}

VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "by rows": (FUSED, 8),
    "by rows, recomputed, accumulated": ({**FUSED, **RECOMPUTED}, 1),
    "by features, accumulated": (ON_DIM1, 2),
    "by features, recomputed, kept gathered": (
        {**ON_DIM1, **RECOMPUTED, "reshard_after_forward": False},
        8,
    ),
}
"""Settings of the model, and rows in a micro-batch."""
ALONE: dict[str, tuple[dict[str, Any], int]] = {
    "qkv alone": ({"fusions": ["qkv"]}, 4),
    "gate_up alone": ({"fusions": ["gate_up"]}, 4),
}


@dataclass(frozen=True)
class Trace:
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Array]
    """Of the first step."""
    weights: dict[str, Array]


def rows_of(step: int) -> list[list[Sample]]:
    random = np.random.default_rng([11, step])
    lengths, prompts = [3, 31, 9, 24, 5, 17, 2, 12], [1, 20, 3, 24, 2, 1, 1, 10]
    return [
        [sample(random.integers(3, 259, length).tolist(), prompt)]
        for length, prompt in zip(lengths, prompts, strict=True)
    ]


def reference_loss(model: Any, step: int) -> torch.Tensor:
    """Mean cross-entropy over the trained tokens, each conversation in a call of its own."""
    losses, count = [], 0
    for (item,) in rows_of(step):
        tokens, is_trained = torch.from_numpy(item.tokens), torch.from_numpy(item.weights["ce"])[1:] > 0
        logits = model(tokens[None], use_cache=False).logits[0, :-1][is_trained]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:][is_trained], reduction="sum"))
        count += int(is_trained.sum())
    return torch.stack(losses).sum() / count


def reference_trace(folder: Path) -> Trace:
    """What an ordinary loop gives on one process, without fusion."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = dict(model.named_parameters())
    groups = [
        {"params": [item for item in named.values() if item.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [item for item in named.values() if item.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, grad_norms, gradients = [], [], {}
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR / (step + 1)
        loss = reference_loss(model, step)
        loss.backward()
        if step == 0:
            gradients = {name: whole(item.grad) for name, item in named.items() if item.grad is not None}
        grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trace(losses, grad_norms, gradients, {name: item.detach().numpy() for name, item in named.items()})


def cut(model: CausalLM, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Whole run-time tensors under logical names, by the sizes that the architecture's config tells."""
    config = model.lm.config.get_text_config()
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    found: dict[str, Array] = {}
    for name, item in tensors.items():
        if "qkv_proj" in name:
            for part, rows in zip("qkv", np.split(item, [q, q + kv]), strict=True):
                found[name.replace("qkv_proj", f"{part}_proj")] = rows
        elif "gate_up_proj" in name:
            for part, rows in zip(("gate", "up"), np.split(item, 2), strict=True):
                found[name.replace("gate_up_proj", f"{part}_proj")] = rows
        else:
            found[name] = item
    return found


def weights_by_logical_name(model: CausalLM) -> dict[str, Array]:
    return cut(model, {name: whole(item.parameter) for name, item in model.run_parameters().items()})


def first_gradients(model: CausalLM, engine: Engine, process: Process, size: int) -> dict[str, Array]:
    batch = step_batch(rows_of(0), process, size)
    local = float(sum(item.count_trainable("ce") for item in batch.micro_batches))
    engine.forward_backward(batch.micro_batches, {"ce": process.all_sum([local])[0]}, lr_factor=None)
    gradients: dict[str, Array] = {}
    for name, item in model.run_parameters().items():
        assert item.parameter.grad is not None, name
        gradients[name] = whole(item.parameter.grad)
    engine.discard()
    return cut(model, gradients)


def adamw() -> AdamWConfig:
    return AdamWConfig(lr=LR, weight_decay=WEIGHT_DECAY, betas=list(BETAS), eps=EPS, max_grad_norm=MAX_NORM)


def trace_of(folder: str, process: Process, settings: Mapping[str, Any], size: int) -> Trace:
    model = build_sharded(folder, process, **settings)
    engine = build_engine(model, process, optimizer=adamw())
    gradients = first_gradients(model, engine, process, size)
    steps, _ = train(engine, process, [step_batch(rows_of(step), process, size) for step in range(NUM_STEPS)])
    return Trace(
        [item["loss"] for item in steps],
        [item["grad_norm"] for item in steps],
        gradients,
        weights_by_logical_name(model),
    )


def traces_on_rank(folders: dict[str, str]) -> dict[tuple[str, str], Trace]:
    process = rank_process()
    variants = {**VARIANTS, **ALONE} if process.world_size == 1 else VARIANTS
    return {
        (family, name): trace_of(folder, process, settings, size)
        for family, folder in folders.items()
        for name, (settings, size) in variants.items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fusion")
    # 48 rows of q, 12 of k and 12 of v; 96 of gate and of up: shards of two, three and four ranks end inside.
    return {
        family: write_tiny_model(root / family, family=family, hidden=48, kv_heads=1) for family in FAMILIES
    }


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Trace]:
    return {family: reference_trace(folder) for family, folder in folders.items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_and_ten_updates_equal_a_plain_loop_without_fusion(
    world_size: int, folders: dict[str, Path], references: dict[str, Trace]
) -> None:
    places = {family: str(folder) for family, folder in folders.items()}
    for of_rank in run_ranks(traces_on_rank, world_size, places):
        assert len(of_rank) >= len(FAMILIES) * len(VARIANTS)
        for (family, name), trace in of_rank.items():
            reference = references[family]
            assert min(reference.grad_norms) > MAX_NORM, "the norm must be clipped in every step"
            assert trace.losses == pytest.approx(reference.losses, rel=1e-6), (family, name)
            assert trace.grad_norms == pytest.approx(reference.grad_norms, abs=1e-6), (family, name)
            assert difference(trace.gradients, reference.gradients) <= 1e-6, (family, name)
            assert difference(trace.weights, reference.weights) <= 1e-6, (family, name)


LAYOUTS: dict[str, dict[str, Any]] = {"not fused": {}, "by rows": FUSED, "by features": ON_DIM1}
OPTIMIZERS: dict[str, OptimizerConfig] = {"adamw": adamw(), "muon": MuonConfig(lr=LR)}
SWITCHES = [
    *[("adamw", before, now) for before in LAYOUTS for now in LAYOUTS if before != now],
    ("muon", "not fused", "by features"),
    ("muon", "by features", "by rows"),
    ("muon", "by rows", "not fused"),
]
"""Optimizer, layout of the run that saved, layout of the run that goes on."""


@dataclass(frozen=True)
class Saved:
    """A run at the moment of its save, and its losses after it."""

    weights: dict[str, Array]
    losses: list[float]


def manager_of(
    root: Path, process: Process, model: CausalLM, engine: Engine, config: CheckpointConfig | None
) -> CheckpointManager:
    optimizer = engine._optimizer
    parts = {"model": ModelPart(model, optimizer), "optimizer": optimizer}
    return CheckpointManager(config, RunFolder(root), process, parts, {})


def save_on_rank(root: str, folder: str) -> dict[tuple[str, str], Saved]:
    """Three updates of every optimizer in every layout, a save, and two more."""
    process, found = rank_process(), {}
    for kind, section in OPTIMIZERS.items():
        for layout, settings in LAYOUTS.items():
            model = build_sharded(folder, process, **settings)
            engine = build_engine(model, process, optimizer=section)
            train(engine, process, [step_batch(rows_of(step), process, 2) for step in range(3)])
            place = Path(root) / kind / layout
            with manager_of(place, process, model, engine, CheckpointConfig()) as manager:
                manager.save(3)
                manager.wait()
            weights = weights_by_logical_name(model)
            steps, _ = train(engine, process, [step_batch(rows_of(step), process, 2) for step in (3, 4)])
            found[kind, layout] = Saved(weights, [item["loss"] for item in steps])
    return found


def load_on_rank(root: str, folder: str, again: str) -> dict[tuple[str, str, str], Saved]:
    """Every switch: loaded over random weights, saved again, and trained on."""
    process, found = rank_process(), {}
    for kind, before, now in SWITCHES:
        plan = planned(ResumeConfig(), RunFolder(Path(root) / kind / before), process, {})
        model = build_sharded(folder, process, init="random", seed=9, **LAYOUTS[now])
        engine = build_engine(model, process, optimizer=OPTIMIZERS[kind])
        place = Path(again) / kind / before / now
        with manager_of(place, process, model, engine, CheckpointConfig()) as manager:
            manager.load(plan)
            manager.save(3)
            manager.wait()
        weights = weights_by_logical_name(model)
        steps, _ = train(engine, process, [step_batch(rows_of(step), process, 2) for step in (3, 4)])
        found[kind, before, now] = Saved(weights, [item["loss"] for item in steps])
    return found


@pytest.fixture(scope="module")
def saved(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[tuple[str, str], Saved]]:
    """The folder of the checkpoints that two ranks wrote of a model with biases, and what was in them."""
    root = tmp_path_factory.mktemp("saved")
    return root, run_ranks(save_on_rank, 2, str(root), str(folders["qwen2"]))[0]


def tensors_of(root: Path, part: str) -> dict[str, torch.Tensor]:
    return read_tensors(root / "checkpoints" / "step_3", part)


def assert_same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, item in left.items():
        assert torch.equal(item, right[name]), name


def test_a_checkpoint_holds_the_logical_weights_and_moments_whatever_is_fused(
    saved: tuple[Path, dict[tuple[str, str], Saved]],
) -> None:
    root, runs = saved
    for (kind, layout), run in runs.items():
        stored = tensors_of(root / kind / layout, "model")
        assert_same(stored, {name: torch.from_numpy(item) for name, item in run.weights.items()})
    plain = tensors_of(root / "adamw" / "not fused", "optimizer")
    assert "model.layers.1.self_attn.k_proj.bias.exp_avg_sq" in plain
    assert plain["model.layers.0.mlp.up_proj.weight.step"] == 3.0
    for layout in ("by rows", "by features"):
        fused = tensors_of(root / "adamw" / layout, "optimizer")
        assert fused.keys() == plain.keys()
        for name, item in fused.items():
            torch.testing.assert_close(item, plain[name], atol=1e-6, rtol=0.0, msg=name)
        assert (
            tensors_of(root / "muon" / layout, "optimizer").keys()
            == tensors_of(root / "muon" / "not fused", "optimizer").keys()
        )


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_goes_on_from_a_checkpoint_of_any_other_fusion_and_sharding(
    world_size: int,
    saved: tuple[Path, dict[tuple[str, str], Saved]],
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    root, runs = saved
    for of_rank in run_ranks(load_on_rank, world_size, str(root), str(folders["qwen2"]), str(tmp_path)):
        assert of_rank.keys() == set(SWITCHES)
        for (kind, before, now), run in of_rank.items():
            then = runs[kind, before]
            assert difference(run.weights, then.weights) == 0.0, (kind, before, now)
            for part in ("model", "optimizer"):
                assert_same(
                    tensors_of(tmp_path / kind / before / now, part), tensors_of(root / kind / before, part)
                )
            # The second loss follows from an update; Muon's of a fused matrix is another one.
            num_alike = 2 if kind == "adamw" else 1
            assert run.losses[:num_alike] == pytest.approx(then.losses[:num_alike], rel=1e-6)


def export_on_rank(root: str, folder: str) -> dict[str, Array]:
    process = rank_process()
    model = build_sharded(folder, process, **ON_DIM1)
    engine = build_engine(model, process)
    train(engine, process, [step_batch(rows_of(step), process, 2) for step in range(2)])
    config = ModelConfig(name=folder)
    tokenizer = load_tokenizer(config, resolve_model(config))
    weights = ModelPart(model, engine._optimizer).tensors
    export = ExportConfig(dtype="float32")
    hook = ExportHook(export, process, Path(root), Path(folder), weights, tokenizer)
    hook.after_step(TrainState(step=2))
    hook.finish(TrainState(step=2))
    return weights_by_logical_name(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_of_fused_weights_loads_as_the_model_without_fusion(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    weights = run_ranks(export_on_rank, 2, str(tmp_path), str(folders[family]))[0]
    folder = tmp_path / "step_2"
    assert load_file(folder / "model.safetensors").keys() == weights.keys()
    loaded, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert difference({name: item.detach().numpy() for name, item in loaded.named_parameters()}, weights) == 0
