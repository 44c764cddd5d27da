"""Packed rows through every attention and several architectures, compared with documents on their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import ModelError
from tests.support.engine import build_engine, build_sharded, sample, step_batch
from tests.unit.trainer.model.families import FAMILIES, write_family
from trainer.model.attention import lay_out
from trainer.model.causal_lm import CausalLM
from trainer.parallel.process import Process

FIRST, SECOND = [9, 21, 33, 45, 57, 69, 81, 93, 105], [4, 16, 28, 40, 52, 64, 76]
CHANGED = [8, 120, 3, 77, 14, 99, 5, 61, 7]
# Gemma 2 caps its scores, which transformers' sdpa does not.
CASES = [
    (family, attention)
    for family in FAMILIES
    for attention in ("varlen", "sdpa", "eager")
    if (family, attention) != ("gemma2", "sdpa")
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write_family(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Any]:
    """transformers' own model of every family."""
    from transformers import AutoModelForCausalLM

    return {
        family: AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for family, folder in folders.items()
    }


def states_and_logits(
    model: CausalLM, rows: Sequence[Sequence[int]], attention: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of a packed row."""
    tokens, positions, documents = lay_out(rows, torch.device("cpu"))
    arguments = {"tailrace_documents": documents} if attention == "varlen" else {}
    with model.inference():
        return model(tokens, positions, arguments, lambda hidden, head: (hidden, head(hidden)))


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_packed_document_sees_nothing_of_its_neighbour_and_is_what_it_is_alone(
    family: str, attention: str, folders: dict[str, Path], references: dict[str, Any], process: Process
) -> None:
    model = build_sharded(folders[family], process, attention=attention)
    packed, logits = states_and_logits(model, [FIRST, SECOND], attention)
    moved, _ = states_and_logits(model, [CHANGED, SECOND], attention)
    alone, alone_logits = states_and_logits(model, [SECOND], attention)
    start = len(FIRST)
    assert (packed[:start] - moved[:start]).abs().max() > 1e-2, "the change must be seen where it was made"
    torch.testing.assert_close(moved[start:], packed[start:], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(packed[start:], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[start:], alone_logits, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        own = references[family](torch.tensor([SECOND]), use_cache=False).logits[0]
    torch.testing.assert_close(logits[start:], own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_norm_are_those_of_the_model_itself(
    family: str, folders: dict[str, Path], references: dict[str, Any], process: Process
) -> None:
    reference = references[family]
    reference.zero_grad()
    losses = []
    for document, num_prompt in ((FIRST, 3), (SECOND, 1)):
        # Every document in a call of its own, with all logits of it: no packing, no masks.
        logits = reference(torch.tensor([document]), use_cache=False).logits[0, num_prompt - 1 : -1]
        losses.append(
            torch.nn.functional.cross_entropy(logits, torch.tensor(document[num_prompt:]), reduction="sum")
        )
    num_tokens = len(FIRST) - 3 + len(SECOND) - 1
    expected = sum(losses, torch.zeros(())) / num_tokens
    expected.backward()
    norm = math.sqrt(sum(float((item.grad**2).sum()) for item in reference.parameters()))

    engine = build_engine(build_sharded(folders[family], process), process)
    batch = step_batch([[sample(FIRST, 3), sample(SECOND, 1)]], process)
    assert batch.micro_batches[0].position_ids.tolist() == [*range(len(FIRST)), *range(len(SECOND))]
    assert batch.micro_batches[0].count_trainable("ce") == num_tokens  # none across the join
    sums = engine.forward_backward(batch.micro_batches, {"ce": float(num_tokens)}, lr_factor=None)
    assert sums["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert engine.grad_norm() == pytest.approx(norm, rel=1e-5)


def test_an_attention_that_would_leave_out_the_cap_of_the_scores_is_refused(
    folders: dict[str, Path], process: Process
) -> None:
    with pytest.raises(ModelError, match=r"caps its attention scores \(attn_logit_softcapping = 2.0\)"):
        build_sharded(folders["gemma2"], process, attention="sdpa")
