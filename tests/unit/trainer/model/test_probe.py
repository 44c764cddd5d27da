"""Models that cannot be trained packed are refused before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import ModelError
from tests.support.engine import build_sharded
from tests.unit.trainer.model.families import write_family
from trainer.model.causal_lm import CausalLM
from trainer.model.probe import check_model
from trainer.parallel.process import Process


class Smeared(torch.nn.Module):
    """A block that adds some of the token before, of whichever document, as a convolution does."""

    def __init__(self, block: torch.nn.Module, share: float) -> None:
        super().__init__()
        self.block = block
        self.share = share

    def forward(self, hidden: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        output = self.block(hidden, *arguments, **named)
        return output + self.share * torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_a_model_that_mixes_neighbours_is_refused(tiny_llama: Path, share: float) -> None:
    lm = load(tiny_llama)
    check_model(CausalLM(lm), torch.device("cpu"), is_varlen=False, is_low_precision=False)
    lm.model.layers[0] = Smeared(lm.model.layers[0], share)
    with pytest.raises(ModelError, match="LlamaForCausalLM lets packed documents influence each other"):
        check_model(CausalLM(lm), torch.device("cpu"), is_varlen=False, is_low_precision=False)


def test_a_model_whose_logits_are_not_a_projection_of_its_hidden_states_is_refused(tiny_llama: Path) -> None:
    lm = load(tiny_llama)
    own = lm.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        output = own(*arguments, **named)
        output.logits = output.logits * 1.01
        return output

    lm.forward = forward
    with pytest.raises(ModelError, match="the logits of LlamaForCausalLM are not a plain projection"):
        check_model(CausalLM(lm), torch.device("cpu"), is_varlen=False, is_low_precision=False)


def test_an_architecture_with_recurrent_layers_is_refused(tmp_path: Path, process: Process) -> None:
    settings = {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]}
    folder = write_family(tmp_path / "minimax", "minimax", settings)
    with pytest.raises(ModelError, match="MiniMaxForCausalLM lets packed documents influence each other"):
        build_sharded(folder, process, attention="sdpa")


def test_attention_with_sinks_is_refused(tmp_path: Path, process: Process) -> None:
    settings = {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    folder = write_family(tmp_path / "gpt_oss", "gpt_oss", settings)
    with pytest.raises(ModelError, match=r"needs s_aux, which model.attention = 'varlen' does not compute"):
        build_sharded(folder, process, attention="varlen")
    # transformers builds its masks without the positions, so its own attention lets documents meet.
    with pytest.raises(ModelError, match="GptOssForCausalLM lets packed documents influence each other"):
        build_sharded(folder, process, attention="eager")


def test_a_model_without_a_linear_head_or_without_a_backbone_is_refused(tiny_llama: Path) -> None:
    lm = load(tiny_llama)
    with pytest.raises(ModelError, match="LlamaModel has no linear output projection"):
        CausalLM(lm.model)
    lm._no_split_modules = ["SomethingElse"]
    with pytest.raises(ModelError, match="LlamaForCausalLM declares no blocks to shard"):
        CausalLM(lm)


def test_an_architecture_that_is_no_causal_lm_is_refused(tmp_path: Path, process: Process) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("t5", d_model=16, num_layers=1, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model.name = '.*' cannot be built"):
        build_sharded(tmp_path, process, init="random")
