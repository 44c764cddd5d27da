"""Forward, backward and update of the sharded model, and what can be read from it.

Owns the model and the optimizer. Knows neither where batches come from nor what the objective means. Every
method is
collective: all ranks call it, with the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.fsdp import FSDPModule

from contract.batch import MicroBatch
from trainer.model.attention import Documents, lay_out
from trainer.model.causal_lm import CausalLM
from trainer.objective.base import DeviceBatch, Head, Objective
from trainer.optimizer.base import Optimizer
from trainer.parallel.device import Device


class Engine:
    """One model, its optimizer and its objective.

    Args:
        model: sharded, with weights.
        optimizer: over the parameters of `model`.
        objective: the loss.
        device: of this rank.
        is_varlen: whether the model's attention takes document boundaries; others find them in the positions.
        max_grad_norm: clip the global norm to this; None does not clip.
    """

    def __init__(
        self,
        model: CausalLM,
        optimizer: Optimizer,
        objective: Objective,
        device: Device,
        *,
        is_varlen: bool,
        max_grad_norm: float | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._objective = objective
        self._device = device
        self._is_varlen = is_varlen
        self._max_grad_norm = max_grad_norm

    @property
    def components(self) -> tuple[str, ...]:
        """Loss components, each with a denominator of its own."""
        return self._objective.components

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        *,
        lr_factor: float | None,
    ) -> dict[str, float]:
        """Accumulate the gradient of this rank's micro-batches; returns this rank's share of every reported
        sum.

        Args:
            lr_factor: of the update that will follow; None if there will be none.
        """
        root = self._model
        assert isinstance(root, FSDPModule)
        sums: dict[str, torch.Tensor] = {}
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            # Every micro-batch is reduced into the shards, so that no full gradient is held; with replicas
            # the all-reduce between them waits for the last.
            root.set_requires_all_reduce(is_last)
            root.set_is_last_backward(is_last)
            loss, reported = self._run(self._to_device(micro_batch), denominators)
            self._optimizer.before_backward(lr_factor if is_last else None)
            loss.backward()
            for name, value in reported.items():
                sums[name] = sums[name] + value if name in sums else value
        return {name: float(value.item()) for name, value in sums.items()}

    def grad_norm(self) -> float:
        """Global L2 norm of the accumulated gradient, before clipping."""
        return self._optimizer.grad_norm()

    def update(self, lr_factor: float, grad_norm: float) -> None:
        """Clip to the norm that `grad_norm()` gave, update the weights, drop the gradient."""
        limit = self._max_grad_norm
        self._optimizer.step(lr_factor, 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6)))
        self._optimizer.zero_grad()

    def discard(self) -> None:
        """Drop the accumulated gradient without an update."""
        self._optimizer.zero_grad()

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> dict[str, float]:
        """This rank's sums over `micro_batches` with denominators of 1, and `<component>_tokens`."""
        sums: dict[str, float] = {f"{component}_tokens": 0.0 for component in self.components}
        denominators = dict.fromkeys(self.components, 1.0)
        with self._model.inference():
            for micro_batch in micro_batches:
                _, reported = self._run(self._to_device(micro_batch), denominators)
                for name, value in reported.items():
                    sums[name] = sums.get(name, 0.0) + float(value.item())
                for component in self.components:
                    sums[f"{component}_tokens"] += micro_batch.count_trainable(component)
        return sums

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: frozenset[int]
    ) -> list[list[int]]:
        """The most likely continuation of each prompt, without its stop token; the same on all ranks.

        All prompts grow as documents of one row and are computed anew for every token: slow, but it runs on
            the
        sharded model as it is, for every architecture.
        """
        answers: list[list[int]] = [[] for _ in prompts]
        open_answers = list(range(len(prompts)))
        with self._model.inference():
            for _ in range(max_new_tokens):
                rows = [[*prompts[index], *answers[index]] for index in open_answers]
                following = self._next_tokens(rows)
                for index, token in zip(open_answers, following, strict=True):
                    if token not in stop_ids:
                        answers[index].append(token)
                open_answers = [
                    index
                    for index, token in zip(open_answers, following, strict=True)
                    if token not in stop_ids
                ]
                if not open_answers:
                    break
        return answers

    def _next_tokens(self, rows: Sequence[Sequence[int]]) -> list[int]:
        tokens, positions, documents = lay_out(rows, self._device.torch_device)
        last = documents.cu_seqlens[1:].long() - 1
        logits = self._model(
            tokens, positions, self._attention_arguments(documents), lambda hidden, head: head(hidden[last])
        )
        return logits.argmax(dim=-1).tolist()

    def _run(
        self, batch: DeviceBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        def function(hidden_TD: torch.Tensor, head: Head) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return self._objective(hidden_TD, head, batch, denominators)

        documents = Documents(batch.cu_seqlens, batch.document_bounds)
        return self._model(batch.tokens, batch.position_ids, self._attention_arguments(documents), function)

    def _attention_arguments(self, documents: Documents) -> dict[str, Documents]:
        return {"tailrace_documents": documents} if self._is_varlen else {}

    def _to_device(self, batch: MicroBatch) -> DeviceBatch:
        upload = self._device.upload
        return DeviceBatch(
            tokens=upload(batch.tokens),
            targets=upload(batch.targets),
            position_ids=upload(batch.position_ids),
            cu_seqlens=upload(batch.cu_seqlens),
            document_bounds=tuple(batch.cu_seqlens.tolist()),
            weights={name: upload(stream) for name, stream in batch.weights.items()},
            streams={name: upload(stream) for name, stream in batch.streams.items()},
        )
