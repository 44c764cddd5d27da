"""Log-probabilities in chunks, and the cross-entropy of selected tokens."""

from __future__ import annotations

import pytest
import torch

from trainer.objective.base import DeviceBatch
from trainer.objective.cross_entropy import CrossEntropy
from trainer.objective.logprob import token_logprobs

NUM_TOKENS, HIDDEN, VOCAB = 23, 6, 11


class RecordingHead:
    """A linear head that keeps how many tokens it was asked for at once, at most."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.weight = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_()
        self.largest = 0
        self.calls = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, len(hidden))
        self.calls += 1
        return hidden @ self.weight.T


def hidden_states() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3)).requires_grad_()


TARGETS = torch.arange(NUM_TOKENS) % VOCAB
UPSTREAM = torch.linspace(-1, 2, NUM_TOKENS)


@pytest.mark.parametrize("tokens_per_chunk", [1, 5, 22, 23, 100])
def test_chunks_change_neither_values_nor_gradients_and_bound_the_logits(tokens_per_chunk: int) -> None:
    hidden, head = hidden_states(), RecordingHead()
    logits_bytes = 4 * VOCAB * tokens_per_chunk
    logprobs = token_logprobs(hidden, head, TARGETS, VOCAB, logits_bytes=logits_bytes)
    (logprobs * UPSTREAM).sum().backward()
    plain, weight = hidden_states(), RecordingHead().weight
    expected = (plain @ weight.T).log_softmax(-1)[torch.arange(NUM_TOKENS), TARGETS]
    (expected * UPSTREAM).sum().backward()
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(hidden.grad, plain.grad)
    torch.testing.assert_close(head.weight.grad, weight.grad)
    assert head.largest == min(tokens_per_chunk, NUM_TOKENS)
    # Below the bound nothing is computed twice.
    assert head.calls == (1 if tokens_per_chunk >= NUM_TOKENS else 2 * -(-NUM_TOKENS // tokens_per_chunk))


def test_logits_of_less_precision_are_normalised_in_float32() -> None:
    head = RecordingHead()
    logprobs = token_logprobs(
        hidden_states().bfloat16(), lambda h: h @ head.weight.bfloat16().T, TARGETS, VOCAB
    )
    assert logprobs.dtype == torch.float32
    exact = (hidden_states().bfloat16() @ head.weight.bfloat16().T).float().log_softmax(-1)
    torch.testing.assert_close(logprobs, exact[torch.arange(NUM_TOKENS), TARGETS])


def batch(weights: torch.Tensor | None) -> DeviceBatch:
    streams = {} if weights is None else {"ce": weights}
    bounds = torch.tensor([0, NUM_TOKENS], dtype=torch.int32)
    return DeviceBatch(TARGETS, TARGETS, torch.arange(NUM_TOKENS), bounds, (0, NUM_TOKENS), streams)


def test_the_loss_is_the_weighted_sum_over_the_global_count_and_only_trained_tokens_reach_the_head() -> None:
    weights = torch.zeros(NUM_TOKENS)
    weights[3], weights[7], weights[8] = 1.0, 0.5, 2.0
    head = RecordingHead()
    loss, reported = CrossEntropy(VOCAB)(hidden_states(), head, batch(weights), {"ce": 40.0})
    logprobs = (hidden_states() @ head.weight.T).log_softmax(-1)
    by_hand = -sum(float(weights[t]) * logprobs[t, TARGETS[t]].item() for t in (3, 7, 8)) / 40.0
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)
    assert reported["loss"].item() == loss.item() and not reported["loss"].requires_grad
    assert head.largest == 3


def test_a_token_without_weight_cannot_spoil_the_loss_even_if_its_state_is_nan() -> None:
    weights = torch.zeros(NUM_TOKENS)
    weights[2] = 1.0
    hidden = hidden_states().detach()
    hidden[5] = float("nan")
    loss, _ = CrossEntropy(VOCAB)(hidden, RecordingHead(), batch(weights), {"ce": 1.0})
    assert torch.isfinite(loss)


@pytest.mark.parametrize("weights", [None, torch.zeros(NUM_TOKENS)])
def test_a_row_without_loss_still_sends_zero_gradients_through_everything(
    weights: torch.Tensor | None,
) -> None:
    hidden, head = hidden_states(), RecordingHead()
    loss, reported = CrossEntropy(VOCAB)(hidden, head, batch(weights), {"ce": 5.0})
    loss.backward()
    assert loss.item() == 0.0 and reported["loss"].item() == 0.0
    assert hidden.grad is not None and not hidden.grad.any()
    assert head.weight.grad is not None and not head.weight.grad.any()
