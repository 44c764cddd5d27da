"""Builds the engine that a configuration asks for."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from contract.errors import ConfigError, ModelError
from contract.model_files import ModelSource, load_tokenizer, resolve_model
from inference.config import InferenceConfig
from inference.engine.embedded import EmbeddedEngine
from inference.engine.model import SlotModel
from inference.engine.probe import probe
from inference.engine.slots import ATTENTION

logger = logging.getLogger(__name__)

_BEFORE_THE_FIRST = -1
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_engine(config: InferenceConfig) -> EmbeddedEngine:
    """Load model and tokenizer, and start drawing. Blocks: minutes for a large model.

    Raises:
        ModelError: the model cannot be found or loaded, or its layers are not plain full attention.
        ConfigError: `device` is not on this machine, or `max_len` is more than the model was made for.
    """
    device = _choose_device(config.device)
    _set_up(device)
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    source = resolve_model(config.model)
    tokenizer = load_tokenizer(config.model, source)
    lm = _load(config, source, device)
    max_len = _choose_max_len(config, lm)
    model = SlotModel(lm, num_slots=config.engine.max_batch, max_len=max_len, name=config.model.name)
    probe(model, config.model.name)
    _check_memory(model, max_len)
    end_ids = _find_end_ids(lm, tokenizer)
    # A run need not begin with the model as loaded: its version 0 is what its trainer publishes first.
    version = _BEFORE_THE_FIRST if config.run_id else 0
    return EmbeddedEngine(model, tokenizer, max_len=max_len, end_ids=end_ids, version=version)


def _choose_device(name: str) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not num_gpus):
        return torch.device("cpu")
    if name == "auto":
        return torch.device("cuda", num_gpus - 1)
    device = torch.device("cuda", torch.device(name).index or 0)
    if device.index >= num_gpus:
        raise ConfigError(
            f"device = {name!r}, but this machine has {num_gpus} CUDA devices; set device = 'cpu' or 'auto'"
        )
    return device


def _set_up(device: torch.device) -> None:
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    # cuDNN's attention, which torch prefers on newer GPUs, is planned anew for every length of a prompt, and
    # may sum in another order for every number of rows. The others do neither.
    torch.backends.cuda.enable_cudnn_sdp(False)


def _check_memory(model: SlotModel, max_len: int) -> None:
    """Say now what would end the server once sequences are long."""
    if model.device.type != "cuda":
        return
    more = model.cache.num_bytes(max_len) - model.cache.num_bytes(model.cache.capacity)
    free, _ = torch.cuda.mem_get_info(model.device)
    if more > free:
        logger.warning(
            "%d sequences (engine.max_batch) of max_len = %d tokens need %.1f GiB of key-value cache, and "
            "%.1f GiB of the GPU are free: if so many get so long, the server ends; lower engine.max_batch",
            model.num_slots,
            max_len,
            more / 2**30,
            free / 2**30,
        )


def _choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "bfloat16" and device.type == "cpu":
        logger.warning(
            "engine.dtype = 'bfloat16' on a CPU: without native support it is over twenty times slower than "
            "float32"
        )
    return _DTYPES[name]


def _load(config: InferenceConfig, source: ModelSource, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    name = config.model.name
    try:
        lm, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            source.folder,
            dtype=_choose_dtype(config.engine.dtype, device),
            attn_implementation=ATTENTION,
            trust_remote_code=config.model.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"model.name = {name!r} cannot be loaded as a language model: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"model.name = {name!r}: weights are missing from the files, e.g. {', '.join(missing[:3])}"
        )
    return lm.to(device)


def _choose_max_len(config: InferenceConfig, lm: Any) -> int:
    longest = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    if config.max_len is None:
        if longest is None:
            raise ConfigError(
                f"model.name = {config.model.name!r} does not say for how many tokens it was "
                f"made; set max_len"
            )
        return longest
    if longest is not None and config.max_len > longest:
        raise ConfigError(
            f"max_len = {config.max_len}, but model.name = {config.model.name!r} was made for sequences of "
            f"at most {longest} tokens; set max_len to at most {longest} (in the configuration of an RL run: "
            f"seq_len, or inference.max_len if it is set)"
        )
    return config.max_len


def _find_end_ids(lm: Any, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of the generation settings that come with the model, and the tokenizer's."""
    generation = getattr(lm, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    found = set(ids if isinstance(ids, list | tuple) else [ids]) | {tokenizer.eos_token_id}
    return tuple(sorted(token for token in found if token is not None))
