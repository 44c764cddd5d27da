"""Weights as a Hugging Face folder that stands on its own: config, tokenizer, generation config, safetensors.

Written beside the target and renamed, so a folder of that name is always whole. transformers itself writes
the weights: it knows how each architecture names them on disk (fused experts, for example, are taken apart
again).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contract.commit import PARTIAL_SUFFIX, fsync
from contract.errors import ModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MARK = "\u2042answer\u2042"
"""A text that no chat template contains."""


def export_weights(
    tensors: Mapping[str, torch.Tensor],
    source_folder: Path,
    target: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    trust_remote_code: bool = False,
) -> None:
    """Write `target`, which loads with `AutoModelForCausalLM` and `AutoTokenizer` and nothing else. One
    process only.

    Args:
        tensors: whole CPU tensors by the name of their parameter in the transformers model; a tied weight may
            be given under both names or once. Where `dtype` is another one, a cast copy of all is held
            meanwhile.
        source_folder: Hugging Face folder of the model that was trained (its config and generation config are
            read).
        target: replaced if it holds an earlier export.
        tokenizer: saved with its chat template; its end tokens end generation.
        dtype: `auto` (that of the source's config), `float32`, `bfloat16` or `float16`.
        max_shard_size: largest file before weights are split, as `5GB`.

    Raises:
        ModelError: a weight of the architecture is missing or has another shape; or `target` is a folder of
            something else.
        OSError: it cannot be written; `target` is unchanged then.
    """
    if target.exists() and not (target / "config.json").is_file() and any(target.iterdir()):
        raise ModelError(f"{target} exists and is no earlier export; choose another folder")
    model, weight_type = _meta_model(source_folder, dtype, trust_remote_code)
    state = _state(model, tensors, weight_type)
    model.generation_config = _generation_config(source_folder, model.config, tokenizer)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        with _without_progress_bars():
            model.save_pretrained(partial, state_dict=state, max_shard_size=max_shard_size)
            tokenizer.save_pretrained(partial)
            _share(partial)
        problems = find_export_problems(partial)
        if problems:
            raise ModelError(f"the export to {target} is not consistent: {'; '.join(problems)}")
        for path in [*partial.iterdir(), partial]:
            fsync(path)
        _replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def find_export_problems(folder: Path) -> list[str]:
    """What is wrong with the weight files of an export: index, files and tensors inside must agree."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    total_bytes = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                found[name] = path.name
                entry = file.get_slice(name)
                total_bytes += _item_bytes(entry.get_dtype()) * torch.Size(entry.get_shape()).numel()
    index_path = folder / _INDEX
    if not index_path.exists():
        return (
            []
            if set(found.values()) == {_WEIGHTS}
            else [f"no {_INDEX} for files {sorted(set(found.values()))}"]
        )
    index = json.loads(index_path.read_text())
    problems = []
    if index["weight_map"] != found:
        wrong = sorted(set(index["weight_map"].items()) ^ set(found.items()))
        problems.append(f"{_INDEX} and files differ, e.g. in {wrong[0][0]}")
    if index["metadata"]["total_size"] != total_bytes:
        problems.append(
            f"{_INDEX} says {index['metadata']['total_size']} bytes, the files hold {total_bytes}"
        )
    return problems


def stop_tokens(generation_eos: int | list[int] | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end generation: those of the source, the tokenizer's end token, and what ends a turn in its
    template.
    """
    ids = (
        []
        if generation_eos is None
        else [generation_eos]
        if isinstance(generation_eos, int)
        else list(generation_eos)
    )
    return list(dict.fromkeys([*ids, *_ids_of(tokenizer.eos_token_id), *_turn_end(tokenizer)]))


def _meta_model(source_folder: Path, dtype: str, trust_remote_code: bool) -> tuple[Any, torch.dtype]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(source_folder, trust_remote_code=trust_remote_code)
    wanted = config.dtype if dtype == "auto" else getattr(torch, dtype)
    weight_type = wanted if isinstance(wanted, torch.dtype) else torch.float32
    # Training may have switched the cache off; whoever loads this generates text.
    config.use_cache = True
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=weight_type, trust_remote_code=trust_remote_code
        )
    return model, weight_type


def _state(model: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tied = set(model.all_tied_weights_keys)
    wanted = {name: value for name, value in model.state_dict().items() if name not in tied}
    missing = sorted(wanted.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - wanted.keys() - tied)
    if missing or unknown:
        raise ModelError(
            f"these are not the weights of {type(model).__name__}: {len(missing)} are missing "
            f"({', '.join(missing[:3])}), {len(unknown)} do not belong to it ({', '.join(unknown[:3])})"
        )
    for name, value in wanted.items():
        if value.shape != tensors[name].shape:
            raise ModelError(
                f"weight {name} has shape {tuple(tensors[name].shape)}, {type(model).__name__} has "
                f"{tuple(value.shape)}; the source model is not the one that was trained"
            )
    return {
        name: tensors[name].detach().to(dtype) if value.is_floating_point() else tensors[name].detach()
        for name, value in wanted.items()
    }


def _generation_config(
    source_folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    from transformers import GenerationConfig

    if (source_folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(source_folder)
    else:
        generation = GenerationConfig.from_model_config(config)
    stops = stop_tokens(generation.eos_token_id, tokenizer)
    generation.eos_token_id = stops[0] if len(stops) == 1 else stops or None
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    generation.use_cache = True
    try:
        generation.validate(strict=True)
    except ValueError:
        # Published configs set a temperature without do_sample; transformers reads them but does not write
        # them.
        generation.do_sample = True
    return generation


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The first special token after an assistant's answer; none without a chat template."""
    from jinja2.exceptions import TemplateError

    if tokenizer.chat_template is None:
        return []
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, ValueError) as error:
        logger.warning(
            "the chat template does not render a plain conversation (%s): its end token is unknown", error
        )
        return []
    assert isinstance(text, str)
    tail = text.rpartition(_MARK)[2]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return next(
        ([token] for token in _ids_of(tokenizer.encode(tail, add_special_tokens=False)) if token in special),
        [],
    )


def _ids_of(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _item_bytes(name: str) -> int:
    return {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}.get(name, 1)


def _replace(partial: Path, target: Path) -> None:
    old = target.with_name(f"{target.name}{PARTIAL_SUFFIX}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _share(folder: Path) -> None:
    """Give every file the rights of any other new file; safetensors makes its own for the owner only."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)
