"""From a model's files to a sharded module with its weights in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from contract.errors import ModelError
from contract.model_files import ModelSource, load_model_config
from trainer.config.model import ModelConfig
from trainer.model.attention import ATTENTION_NAME, register_attention
from trainer.model.causal_lm import CausalLM
from trainer.model.fusion import fuse_projections
from trainer.model.probe import check_model
from trainer.model.weights import TensorReader, materialize, open_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ShardFunction = Callable[[nn.Module, Sequence[nn.Module], Collection[nn.Parameter]], Any]
"""Called with the root, its blocks, and the parameters that are cut along their input features."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers that the summary, MFU and memory estimates need.

    Attributes:
        num_matmul_parameters: that a token is multiplied with: all but the embedding table (the head counts
            also where it is tied), and of a mixture of experts only the experts that a token visits.
        num_block_parameters: in the decoder blocks.
        attention_width: heads times head size.
    """

    num_parameters: int
    num_matmul_parameters: int
    num_block_parameters: int
    is_tied: bool
    num_layers: int
    attention_width: int
    hidden_size: int
    vocab_size: int

    def num_gathered_parameters(self, reshard_after_forward: bool) -> int:
        """Most parameters that FSDP holds gathered: the root, and two blocks (the next is prefetched) or all
        of them.
        """
        root = self.num_parameters - self.num_block_parameters
        block = self.num_block_parameters // max(1, self.num_layers)
        return root + (
            min(2, self.num_layers) * block if reshard_after_forward else self.num_block_parameters
        )


def build_model(
    config: ModelConfig,
    source: ModelSource,
    device: torch.device,
    shard: ShardFunction,
    *,
    seed: int,
    compute_dtype: torch.dtype,
) -> CausalLM:
    """Build on the meta device, shard, then read the weights straight into the shards.

    With `model.offload = "full"` the shards are of the type of forward and backward, and what they were
    rounded from is on the host, in `CausalLM.masters`.

    Args:
        config: the model section.
        source: its files.
        device: where the shards live.
        shard: shards in place, while everything is on the meta device.
        seed: of random weights (`model.init = "random"`).
        compute_dtype: of forward and backward.

    Raises:
        ModelError: the architecture or its weights cannot be used.
    """
    hf_config = load_model_config(config, source)
    model = _build_on_meta(config, hf_config)
    is_on_host = config.offload == "full"
    if is_on_host:
        # Parameters only: rotary tables and the like keep their precision, as with FSDP's own casts.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(compute_dtype)
    blocks = model.blocks()
    if config.activation_checkpointing == "block":
        model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shard(model, blocks, _on_dim1(model) if config.shard_fused_on_dim1 else ())
    if config.init == "random":
        reader = TensorReader(_random_weights(config, hf_config, seed))
    else:
        needed = set(model.logical_state())
        reader = open_weights(source.folder, needed, model.lm, lambda: _converted_weights(config, source))
    materialize(model, reader, device, keep_masters=is_on_host)
    is_low_precision = compute_dtype is not torch.float32
    check_model(model, device, is_varlen=config.attention == "varlen", is_low_precision=is_low_precision)
    if config.compile:
        for block in blocks:
            # Only the block's own forward: FSDP's hooks around it cannot be traced.
            block.forward = torch.compile(block.forward)
    return model.train()


def describe(model: CausalLM) -> ModelShape:
    """Sizes of the whole model, not of a shard."""
    text = model.lm.config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    embedding, output = model.lm.get_input_embeddings(), model.lm.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding) and isinstance(output, nn.Linear)
    num_parameters = sum(item.parameter.numel() for item in model.run_parameters().values())
    is_tied = output.weight is embedding.weight
    num_matmul = num_parameters if is_tied else num_parameters - embedding.weight.numel()
    return ModelShape(
        num_parameters=num_parameters,
        num_matmul_parameters=num_matmul - _num_idle_expert_parameters(model),
        num_block_parameters=sum(item.numel() for block in model.blocks() for item in block.parameters()),
        is_tied=is_tied,
        num_layers=text.num_hidden_layers,
        attention_width=heads * head_dim,
        hidden_size=text.hidden_size,
        vocab_size=model.vocab_size,
    )


def _num_idle_expert_parameters(model: CausalLM) -> int:
    """Parameters of the experts that a token does not visit; 0 for dense models."""
    text = model.lm.config.get_text_config()
    visited = getattr(text, "num_experts_per_tok", None)
    total = 0
    for module in model.lm.modules():
        # transformers keeps the experts of a layer in three-dimensional weights, experts first.
        weights = [item for item in module.parameters(recurse=False) if item.ndim == 3]
        if visited and weights and "Experts" in type(module).__name__:
            total += sum(item.numel() * (item.shape[0] - visited) // item.shape[0] for item in weights)
    return total


def _build_on_meta(config: ModelConfig, hf_config: PretrainedConfig) -> CausalLM:
    from transformers import AutoModelForCausalLM

    register_attention()
    implementation = ATTENTION_NAME if config.attention == "varlen" else config.attention
    arguments: dict[str, Any] = {"attn_implementation": implementation, "dtype": torch.float32}
    try:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(
                hf_config, trust_remote_code=config.trust_remote_code, **arguments
            )
    except (ValueError, ImportError) as error:
        raise ModelError(f"model.name = {config.name!r} cannot be built: {error}") from error
    if config.attention == "varlen" and not getattr(lm, "_supports_attention_backend", False):
        raise ModelError(
            f"{type(lm).__name__} does not take attention from outside; set model.attention = 'sdpa' or "
            f"'eager'"
        )
    softcap = getattr(hf_config.get_text_config(), "attn_logit_softcapping", None)
    if config.attention == "sdpa" and softcap is not None:
        raise ModelError(
            f"{type(lm).__name__} caps its attention scores (attn_logit_softcapping = {softcap}), which "
            f"model.attention = 'sdpa' leaves out; set 'varlen' or 'eager'"
        )
    if config.activation_checkpointing == "block" and not lm.supports_gradient_checkpointing:
        raise ModelError(f"{type(lm).__name__} does not support model.activation_checkpointing = 'block'")
    return CausalLM(lm, fuse_projections(lm, config.fusions))


def _on_dim1(model: CausalLM) -> list[nn.Parameter]:
    """The packed weights; a packed bias has no input features."""
    parameters = model.run_parameters()
    return [parameters[name].parameter for name in model.packed if parameters[name].parameter.ndim == 2]


def _converted_weights(config: ModelConfig, source: ModelSource) -> Mapping[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        source.folder,
        dtype=torch.float32,
        trust_remote_code=config.trust_remote_code,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"model.name = {config.name!r}: weights are missing from the files, e.g. {', '.join(missing[:3])}"
        )
    return model.state_dict()


def _random_weights(
    config: ModelConfig, hf_config: PretrainedConfig, seed: int
) -> Mapping[str, torch.Tensor]:
    """Full random weights, equal on every rank: the draw does not depend on how the model is sharded."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
    return model.state_dict()
