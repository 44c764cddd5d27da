"""The parts of a checkpoint that belong to nobody else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from contract.batch import StepBatch
from contract.errors import CheckpointError
from tests.support.engine import ListSource, build_sharded
from tests.unit.trainer.model.families import write_family
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process
from trainer.parts import DataPart, ModelPart, StatePart, TrackerPart
from trainer.state import TrainState


def test_progress_and_schedule_together_carry_every_counter_once() -> None:
    state = TrainState(step=1, num_tokens=2, num_samples=3, num_skipped=4, schedule_step=5)
    progress, schedule = StatePart.progress(state), StatePart.schedule(state)
    assert schedule.values() == {"schedule_step": 5}
    assert progress.values() == {"step": 1, "num_tokens": 2, "num_samples": 3, "num_skipped": 4}
    fresh = TrainState()
    StatePart.progress(fresh).loaded(json.loads(json.dumps(progress.values())))
    assert fresh == TrainState(step=1, num_tokens=2, num_samples=3, num_skipped=4, schedule_step=0)
    StatePart.schedule(fresh).loaded(schedule.values())
    assert fresh == state
    assert progress.tensors() == {} and progress.tensors_to_load(["x"]) == {}


def test_the_data_part_is_the_position_of_the_source() -> None:
    source = ListSource([StepBatch([], 0, 0.0)] * 3)
    source.next_step()
    values = DataPart(source).values()
    other = ListSource([])
    DataPart(other).loaded(values)
    assert (values, other.position) == ({"position": 1}, 1)


def test_the_tracker_part_keeps_ids_apart_from_what_was_saved() -> None:
    part = TrackerPart()
    part.ids["wandb"] = "abc"
    saved = part.values()
    part.ids["wandb"] = "other"
    assert saved == {"wandb": "abc"}
    part.loaded(saved)
    part.ids["tensorboard"] = "x"
    assert saved == {"wandb": "abc"}


class Copies:
    """An optimizer that keeps some weights apart, and counts how often it was told that they were loaded."""

    def __init__(self, weights: dict[str, LogicalTensor] | None = None) -> None:
        self._weights = weights or {}
        self.num_loads = 0

    def weights(self) -> dict[str, LogicalTensor]:
        return self._weights

    def weights_loaded(self) -> None:
        self.num_loads += 1


def test_weights_that_the_optimizer_keeps_apart_stand_for_those_of_the_model(
    tiny_llama: Path, process: Process
) -> None:
    model = build_sharded(tiny_llama, process)
    master = LogicalTensor.replicated(torch.ones(32), "host")
    copies = Copies({"model.norm.weight": master})
    part = ModelPart(model, copies)
    assert part.tensors()["model.norm.weight"] is master
    assert part.tensors().keys() == model.logical_state().keys()
    assert copies.num_loads == 0
    part.loaded({})
    assert copies.num_loads == 1


def test_the_model_part_holds_every_weight_once_and_persistent_buffers(
    tiny_llama: Path, tmp_path: Path, process: Process
) -> None:
    tied = ModelPart(build_sharded(tiny_llama, process), Copies())
    assert "lm_head.weight" not in tied.tensors() and "model.embed_tokens.weight" in tied.tensors()
    assert not any("inv_freq" in name for name in tied.tensors())
    pieces = [piece for item in tied.tensors().values() for piece in item.pieces]
    assert not any(piece.tensor.requires_grad for piece in pieces)
    settings = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    folder = write_family(tmp_path, "glm4_moe", {**settings, "first_k_dense_replace": 1}, buffers=0.5)
    model = build_sharded(folder, process)
    (name,) = [
        name for name in ModelPart(model, Copies()).tensors() if name.endswith("e_score_correction_bias")
    ]
    assert model.run_state().keys() - model.run_parameters().keys() == {name}
    # What is loaded must reach the model.
    part = ModelPart(model, Copies())
    (piece,) = part.tensors_to_load(part.tensors().keys())[name].pieces
    piece.tensor.fill_(0.75)
    assert torch.equal(dict(model.named_buffers())[f"lm.{name}"], torch.full((2,), 0.75))


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(
    tiny_llama: Path, process: Process
) -> None:
    part = ModelPart(build_sharded(tiny_llama, process), Copies())
    names = set(part.tensors())
    assert part.tensors_to_load(names).keys() == names
    message = (
        r"another model: 1 weights are missing from it \(e\.g\. model\.norm\.weight\), "
        r"2 are not of this model \(e\.g\. lm_head\.weight\)"
    )
    with pytest.raises(CheckpointError, match=message):
        part.tensors_to_load((names - {"model.norm.weight"}) | {"lm_head.weight", "other.weight"})
