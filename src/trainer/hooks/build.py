"""From the configuration to the hooks of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from contract.layout import RunFolder
from contract.model_files import ModelSource
from telemetry.console import Console
from trainer.config import SFTConfig, TrainConfig
from trainer.engine import Engine
from trainer.hooks.base import Hook
from trainer.hooks.export import ExportHook
from trainer.hooks.housekeeping import GarbageHook, ProfileHook
from trainer.hooks.sample import Prompt, SampleHook
from trainer.hooks.validate import ValidateHook
from trainer.parallel.layout import LogicalTensor
from trainer.parallel.process import Process
from trainer.parallel.stop import Requests
from trainer.source.base import ValidationSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_hooks(
    config: TrainConfig,
    process: Process,
    folder: RunFolder,
    files: ModelSource,
    weights: Callable[[], Mapping[str, LogicalTensor]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    before_export: Sequence[Hook] = (),
    after_export: Sequence[Hook] = (),
) -> Sequence[Hook]:
    """The hooks that every kind of training has if `config` asks for them, around those of its own kind, in
    the order in which they run.
    """
    hooks: list[Hook] = []
    if config.profiler is not None:
        profiler = config.profiler
        hooks.append(
            ProfileHook(
                folder.traces,
                process.rank,
                start_step=profiler.start_step,
                num_steps=profiler.num_steps,
                with_stack=profiler.with_stack,
            )
        )
    hooks += before_export
    if config.export is not None:
        hooks.append(
            ExportHook(
                config.export,
                process,
                folder.weights,
                files.folder,
                weights,
                tokenizer,
                trust_remote_code=config.model.trust_remote_code,
            )
        )
    return [*hooks, *after_export, GarbageHook()]


def build_dataset_hooks(
    config: SFTConfig,
    process: Process,
    requests: Requests,
    engine: Engine,
    console: Console,
    tokenizer: PreTrainedTokenizerBase,
    validation: ValidationSource | None,
) -> Sequence[Hook]:
    """Those of SFT that `config` asks for: validation and samples."""
    hooks: list[Hook] = []
    if config.validation is not None and validation is not None:
        interval, at_start = config.validation.interval, config.validation.at_start
        hooks.append(
            ValidateHook(validation, engine, process, requests, interval=interval, at_start=at_start)
        )
    if config.sample is not None:
        hooks.append(_build_sample_hook(config, tokenizer, engine, console))
    return hooks


def _build_sample_hook(
    config: SFTConfig, tokenizer: PreTrainedTokenizerBase, engine: Engine, console: Console
) -> SampleHook:
    assert config.sample is not None
    system = [{"role": "system", "content": config.sample.system}] if config.sample.system is not None else []
    prompts = []
    for text in config.sample.prompts:
        messages = [*system, {"role": "user", "content": text}]
        rendered: Mapping[str, Any] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )  # pyright: ignore[reportAssignmentType]
        prompts.append(Prompt(text, rendered["input_ids"]))
    return SampleHook(
        engine,
        prompts,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        stop_ids=_stop_ids(tokenizer),
        max_new_tokens=config.sample.max_new_tokens,
        show=console.sample,
    )


def _stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    end = tokenizer.eos_token_id
    return frozenset({end} if isinstance(end, int) else ())
