"""When weights are exported, and that they are those of the sharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from contract.model_files import load_tokenizer, resolve_model
from tests.support.engine import build_sharded, rank_process, weights_of
from tests.support.ranks import run_ranks
from trainer.config.checkpoint import ExportConfig
from trainer.config.model import ModelConfig
from trainer.hooks.export import ExportHook
from trainer.state import TrainState


def hook_over(folder: Path, source: Path, process: Any, interval: int | None) -> tuple[ExportHook, Any]:
    model = build_sharded(source, process)
    config = ModelConfig(name=str(source))
    tokenizer = load_tokenizer(config, resolve_model(config))
    export = ExportConfig(interval=interval)
    return ExportHook(export, process, folder, source, model.logical_state, tokenizer), model


def export_on_ranks(folder: str, source: str) -> tuple[list[Any], Any]:
    process = rank_process()
    hook, model = hook_over(Path(folder), Path(source), process, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    told = []
    for step in (1, 2, 3):
        told.append(set(hook.after_step(TrainState(step=step))))
    told.append(set(hook.finish(TrainState(step=3))))
    told.append(set(hook.finish(TrainState(step=3))))
    return told, weights_of(model)


def test_every_interval_and_the_end_are_exported_once_from_all_shards(
    tmp_path: Path, tiny_llama: Path
) -> None:
    for told, weights in run_ranks(export_on_ranks, 2, str(tmp_path / "weights"), str(tiny_llama)):
        assert told == [set(), {"time/export"}, set(), {"time/export"}, set()]
        for step in (2, 3):
            exported = load_file(tmp_path / "weights" / f"step_{step}" / "model.safetensors")
            for name, item in weights.items():
                np.testing.assert_array_equal(exported[name].float().numpy(), item)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["step_2", "step_3"]


def test_an_export_of_a_history_that_was_left_is_replaced_and_that_of_a_complete_run_is_kept(
    tmp_path: Path, tiny_llama: Path, process: Any
) -> None:
    hook, model = hook_over(tmp_path, tiny_llama, process, None)
    hook.finish(TrainState(step=2))
    hook.finish(TrainState(step=4))
    old = load_file(tmp_path / "step_4" / "model.safetensors")["model.norm.weight"]
    # A new attempt goes on from step 2 and comes to other weights at step 4.
    again, model = hook_over(tmp_path, tiny_llama, process, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert again.finish(TrainState(step=2)) == {}
    assert again.after_step(TrainState(step=3)) == {}
    assert again.finish(TrainState(step=4)).keys() == {"time/export"}
    new = load_file(tmp_path / "step_4" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(new, old + 1.0)
    assert torch.equal(load_file(tmp_path / "step_2" / "model.safetensors")["model.norm.weight"], old)


def test_a_finished_run_whose_export_is_missing_gets_it(
    tmp_path: Path, tiny_llama: Path, process: Any
) -> None:
    hook, _ = hook_over(tmp_path, tiny_llama, process, None)
    assert hook.finish(TrainState(step=5)).keys() == {"time/export"}
    assert (tmp_path / "step_5" / "config.json").is_file()
