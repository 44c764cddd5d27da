"""Turns the loop's numbers into what users read: rates, utilisation, memory; on rank 0 to sinks and
console.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from contract.batch import StepBatch
from telemetry.console import Console
from telemetry.flops import flops_per_token, mean_causal_context, mfu
from telemetry.memory import host_memory
from telemetry.metrics import Metrics
from telemetry.spans import Throughput
from trainer.model.build import ModelShape
from trainer.parallel.process import Process
from trainer.state import TrainState

Value = float | int | None


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak of one device for MFU, in TFLOP/s, and where the number comes from."""

    tflops: float
    origin: str


class StepReporter:
    """Implements `loop.Reporter`. Ranks other than 0 hold sinks that take nothing."""

    def __init__(
        self,
        process: Process,
        metrics: Metrics,
        console: Console,
        shape: ModelShape,
        peak: Peak,
        *,
        peak_lr: float,
        total_steps: int,
    ) -> None:
        self._process = process
        self._metrics = metrics
        self._console = console
        self._shape = shape
        self._peak = peak
        self._peak_lr = peak_lr
        self._total_steps = total_steps
        self._throughput = Throughput()
        self.last_values: dict[str, Value] = {}
        """Latest value of every metric."""

    def report(self, state: TrainState, values: Mapping[str, Value], batch: StepBatch | None) -> None:
        """See `Reporter`."""
        if not self._process.is_main:
            return
        record = dict(values)
        if batch is not None:
            record |= self._rates(state, record, batch)
        self.last_values |= record
        self._metrics.log(state.step, record)
        if batch is not None:
            self._console.step(state.step, record)

    def _rates(self, state: TrainState, values: Mapping[str, Value], batch: StepBatch) -> dict[str, Value]:
        """Metrics that follow from those of a step. MFU takes this rank's documents for those of all."""
        lr_factor, num_tokens, seconds = values["lr_factor"], values["step_tokens"], values["step_seconds"]
        assert lr_factor is not None and num_tokens is not None and seconds is not None
        rates: dict[str, Value] = dict(
            self._throughput.update(
                num_tokens=int(num_tokens), seconds=seconds, steps_left=self._total_steps - state.step
            )
        )
        lengths = [
            int(length)
            for micro_batch in batch.micro_batches
            for length in (micro_batch.cu_seqlens[1:] - micro_batch.cu_seqlens[:-1])[
                : len(micro_batch.sample_ids)
            ]
        ]
        device_bytes = self._process.device.peak_memory_bytes()
        return rates | {
            "lr": self._peak_lr * lr_factor,
            "mfu": mfu(
                tokens_per_second=rates["tokens_per_second"] or 0.0,
                flops_per_token=flops_per_token(
                    num_matmul_parameters=self._shape.num_matmul_parameters,
                    num_layers=self._shape.num_layers,
                    attention_width=self._shape.attention_width,
                    mean_context=mean_causal_context(lengths),
                ),
                num_devices=self._process.world_size,
                peak_tflops=self._peak.tflops,
            ),
            "memory_bytes": device_bytes if device_bytes is not None else host_memory().peak_bytes,
        }
