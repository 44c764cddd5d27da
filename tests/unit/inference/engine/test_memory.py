"""Where the engine's tensors lie, and how much they take."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from contract.policy import GenerateRequest, Sampling
from inference.engine.model import SlotModel
from inference.engine.probe import probe
from inference.engine.scheduler import Scheduler
from inference.engine.sequence import Sequence
from inference.engine.slots import ATTENTION
from inference.engine.weights import stage
from tests.unit.inference.engine.support import weights_of


def slot_model(folder: Path, *, num_slots: int = 4) -> SlotModel:
    lm = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION)
    return SlotModel(lm, num_slots=num_slots, max_len=400, name=folder.name)


def draw_all(scheduler: Scheduler) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Every way of drawing, a shared prompt, more requests than slots, and a cache that grows."""
    samplings = [
        Sampling(seed=1, max_tokens=80),
        Sampling(seed=2, max_tokens=9, temperature=0.0),
        Sampling(seed=3, max_tokens=9, top_k=5, top_p=0.9),
        Sampling(seed=4, max_tokens=9, min_tokens=4, stop_ids=[7]),
        Sampling(seed=5, max_tokens=3),
    ]
    sequences = [
        Sequence(GenerateRequest(str(number), [1, 8, 9], sampling), None)
        for number, sampling in enumerate(samplings)
    ]
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.num_running or scheduler.num_waiting:
        scheduler.step(admit=True)
    taken = [sequence.take() for sequence in sequences]
    return [(drawn.tokens, drawn.logprobs) for drawn in taken]


def test_every_tensor_is_made_on_the_models_device_and_not_on_a_default_one(
    llama: Path, other_llama: Path
) -> None:
    def run(model: SlotModel) -> object:
        scheduler = Scheduler(model, 400)
        first = draw_all(scheduler)
        scheduler.update(stage(model.lm, weights_of(other_llama)).copy_into, 1)
        return first, draw_all(scheduler)

    expected = run(slot_model(llama))
    model = slot_model(llama)
    # A tensor that is made without a device has no memory now, and the first use of it fails.
    with torch.device("meta"):
        assert run(model) == expected


def test_the_cache_takes_what_it_says_that_it_takes(llama: Path) -> None:
    cache = slot_model(llama, num_slots=3).cache
    for num_tokens in (1, 200, 400):
        cache.reserve(num_tokens)
        found = sum(data.untyped_storage().nbytes() for data in cache._data)
        assert found == cache.num_bytes(cache.capacity) >= cache.num_bytes(num_tokens)


def test_no_idle_rows_are_computed_where_nothing_is_equal_anyway(llama: Path) -> None:
    model = slot_model(llama, num_slots=8)
    # As on a device whose sums depend on where a row is.
    model.lm.lm_head.register_forward_hook(
        lambda _, inputs, output: output * (1 + 1e-5 * torch.arange(len(output)))[:, None, None]
    )
    probe(model, "llama")
    assert model.row_counts == (1, 2, 4, 8)
