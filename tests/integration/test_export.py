"""Exported weights stand alone: a fresh interpreter without network loads what was trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integration.place import Place, tensors_of
from tests.support.tiny_model import CHAT_TEMPLATE

PROGRAM = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
for folder in sys.argv[1:]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "abc"}]
    how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    ids = tokenizer.apply_chat_template(messages, **how)
    with torch.no_grad():
        logits = model.eval()(**ids).logits[0]
    print(json.dumps({
        "ids": ids["input_ids"][0].tolist(), "logits": logits.tolist(), "dtype": str(model.dtype),
        "eos": GenerationConfig.from_pretrained(folder).eos_token_id, "use_cache": model.config.use_cache,
        "template": tokenizer.chat_template, "tokenizer_eos": tokenizer.eos_token_id,
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "text": tokenizer.decode(model.generate(**ids, max_new_tokens=4)[0]),
    }))
"""


def test_exports_of_one_and_of_two_ranks_load_in_a_fresh_interpreter_with_the_trained_weights(
    place: Place,
) -> None:
    moved = []
    for name, world_size in (("one", 1), ("two", 2)):
        place.train(name, max_steps=5, export__interval=2, ckpt__interval=2, world_size=world_size)
        folder = place.folder(name).weights
        assert sorted(path.name for path in folder.iterdir()) == ["step_2", "step_4", "step_5"]
        # Away from the model it was trained from, without network.
        moved.append((folder / "step_5").rename(place.root / f"elsewhere_{name}"))
    words = [sys.executable, "-c", PROGRAM, *map(str, moved)]
    result = subprocess.run(words, capture_output=True, text=True, env=place.nursery.environment)
    assert result.returncode == 0, result.stderr

    for name, line in zip(("one", "two"), result.stdout.splitlines()[-2:], strict=True):
        found = json.loads(line)
        model = _model_with(place.shared / "model", place.checkpoint(name, 5))
        with torch.no_grad():
            logits = model(torch.tensor([found["ids"]])).logits[0]
        torch.testing.assert_close(torch.tensor(found["logits"]), logits, rtol=0, atol=1e-6)
        assert found["dtype"] == "torch.float32"
        assert found["eos"] in (2, [2])
        assert found["tokenizer_eos"] == 2
        assert found["tied"]
        assert found["use_cache"]
        assert found["template"] == CHAT_TEMPLATE
        assert found["text"].startswith("<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n")


def test_the_command_ckpt_exports_the_same_weights_as_the_run(run_before: Place) -> None:
    from safetensors.torch import load_file

    from launcher.ckpt import main

    out = run_before.root / "exported"
    assert main(["export", str(run_before.folder().root), "--out", str(out)]) == 0
    weights = run_before.folder().weights / "step_4"
    one, two = (load_file(folder / "model.safetensors") for folder in (out, weights))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


def test_an_export_can_be_trained_from(run_before: Place) -> None:
    weights = run_before.folder().weights / "step_4"
    run_before.train("second", max_steps=1, model__name=weights, optimizer__lr=0.0)
    old, new = (tensors_of(run_before.checkpoint(name, step)) for name, step in (("sft", 4), ("second", 1)))
    assert all(old[name].equal(new[name]) for name in old if name.startswith("model."))


def _model_with(source: Path, checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors_of(checkpoint).items()
        if name.startswith("model.")
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"])
    assert unexpected == []
    return model.eval()
