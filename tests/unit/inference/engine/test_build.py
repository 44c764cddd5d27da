"""Which models and settings the engine takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from contract.errors import ConfigError, ModelError
from contract.sections import ModelFilesConfig
from inference.config import InferenceConfig
from inference.engine.build import build_engine
from inference.engine.model import SlotModel
from inference.engine.probe import probe
from inference.engine.slots import ATTENTION
from tests.support.tiny_model import write_tiny_model


def _config(folder: Path, **settings: object) -> InferenceConfig:
    return InferenceConfig.model_validate(
        {"model": ModelFilesConfig(name=str(folder)), "device": "cpu", "num_threads": 2, **settings}
    )


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma2", "softcap"),
        ("mamba", "embedded engine"),
    ],
)
def test_models_that_are_not_plain_full_attention_are_refused(
    family: str, message: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / family, family=family)
    with pytest.raises(ModelError, match=message):
        build_engine(_config(folder, max_len=64))


def test_a_window_that_no_sequence_exceeds_is_full_attention(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "mistral", family="mistral")
    lm = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION)
    lm.config.sliding_window = 100
    model = SlotModel(lm, num_slots=2, max_len=100, name="mistral")
    probe(model, "mistral")
    assert model.row_counts[-1] == 2
    with pytest.raises(ModelError, match="set max_len to at most 100"):
        SlotModel(lm, num_slots=2, max_len=101, name="mistral")


def test_a_model_that_computes_otherwise_over_the_cache_is_refused(llama: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(llama, attn_implementation=ATTENTION)
    model = SlotModel(lm, num_slots=2, max_len=64, name="llama")
    # A layer that looks at more than its position and the cache: here, at how many tokens come together.
    lm.model.norm.register_forward_hook(lambda _, inputs, output: output + inputs[0].shape[1])
    with pytest.raises(ModelError, match="logits differ by"):
        probe(model, "llama")


def test_rows_have_the_same_bits_with_every_row_count_that_was_found(llama: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(llama, attn_implementation=ATTENTION)
    model = SlotModel(lm, num_slots=32, max_len=400, name="llama")
    probe(model, "llama")
    assert len(model.row_counts) > 1
    generator = torch.Generator().manual_seed(0)
    # Lengths and windows far beyond those of the probe.
    lengths = torch.randint(1, 300, (32,), generator=generator)
    prompts = [torch.randint(259, (int(n),), generator=generator).tolist() for n in lengths]
    for slot, prompt in enumerate(prompts):
        model.prefill(prompt, slot)
    tokens = torch.randint(259, (32,), generator=generator)
    expected = model.decode(tokens, lengths, 301)
    for count in model.row_counts:
        for window in (320, 384):
            model.cache.reserve(window)
            assert torch.equal(model.decode(tokens[:count], lengths[:count], 301, window), expected[:count])


def test_a_server_of_a_run_has_no_version_of_it_before_the_trainer_gives_it_one(llama: Path) -> None:
    async def version_before_and_after(run_id: str) -> tuple[int, int]:
        engine = build_engine(_config(llama, max_len=32, run_id=run_id))
        try:
            before = engine.version
            weights = AutoModelForCausalLM.from_pretrained(llama).state_dict()
            await engine.load(weights.items(), 0, "keep")
            return before, engine.version
        finally:
            await engine.close()

    # The weights of a run that begins with those of another one are not the model as loaded.
    assert asyncio.run(version_before_and_after("0123abcd")) == (-1, 0)
    assert asyncio.run(version_before_and_after("")) == (0, 0)


def test_a_length_that_the_model_was_not_made_for_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="set max_len to at most 512"):
        build_engine(_config(llama, max_len=513))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_device_that_is_not_there_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="0 CUDA devices"):
        build_engine(_config(llama, device="cuda:3"))
