"""The three components of the RL objective against plain formulas, and what its metrics say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from contract.errors import ChannelError, ConfigError
from trainer.config.rl import ClippedLossConfig, CustomLossConfig, LossConfig, TrustRegionLossConfig
from trainer.objective.base import DeviceBatch
from trainer.objective.logprob import token_statistics
from trainer.objective.policy_gradient import PolicyGradient
from trainer.objective.policy_loss import build_token_loss

NUM_TOKENS, HIDDEN, VOCAB = 19, 6, 11
TARGETS = torch.arange(NUM_TOKENS) % VOCAB


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_logprobs(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return ((hidden @ weight.T) / temperature).log_softmax(-1)


def batch(weights: dict[str, torch.Tensor], streams: dict[str, torch.Tensor]) -> DeviceBatch:
    bounds = torch.tensor([0, NUM_TOKENS], dtype=torch.int32)
    positions = torch.arange(NUM_TOKENS)
    return DeviceBatch(TARGETS, TARGETS, positions, bounds, (0, NUM_TOKENS), weights, streams)


def reference_loss(
    config: LossConfig, logprobs: torch.Tensor, sampler: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Token by token, in Python."""
    losses = []
    for logprob, old, advantage in zip(logprobs, sampler, advantages, strict=True):
        ratio = torch.exp(logprob - old)
        if isinstance(config, TrustRegionLossConfig):
            loss = config.log_ratio_penalty * (logprob - old) ** 2
            if config.ratio_min <= float(ratio.detach()) <= config.ratio_max:
                loss = loss - ratio * advantage
        else:
            assert isinstance(config, ClippedLossConfig)
            low, high = 1 - config.clip_low, 1 + config.clip_high
            clipped = min(max(float(ratio), low), high) if not low <= float(ratio) <= high else ratio
            loss = -(ratio * advantage if ratio * advantage <= clipped * advantage else clipped * advantage)
        losses.append(torch.as_tensor(loss))
    return torch.stack(losses)


LOSSES: list[LossConfig] = [
    TrustRegionLossConfig(ratio_min=0.5, ratio_max=2.0, log_ratio_penalty=0.1),
    ClippedLossConfig(clip_low=0.2, clip_high=0.3),
]


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: config.type)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_every_component_is_its_weighted_sum_over_its_own_count(
    config: LossConfig, temperature: float
) -> None:
    hidden, weight = drawn(NUM_TOKENS, HIDDEN, seed=1), drawn(VOCAB, HIDDEN, seed=2)
    rl, ce, ref_kl = (torch.zeros(NUM_TOKENS) for _ in range(3))
    rl[2:12], ce[10:15], ref_kl[4:9] = 1.0, 0.5, 0.25
    rl[3] = 2.0
    tokens = torch.arange(NUM_TOKENS)
    at_temperature = plain_logprobs(hidden, weight, temperature)[tokens, TARGETS]
    sampler = at_temperature + 0.8 * drawn(NUM_TOKENS, seed=3)
    streams = {
        "logprobs": sampler,
        "advantages": drawn(NUM_TOKENS, seed=4),
        "ref_logprobs": at_temperature + 0.3 * drawn(NUM_TOKENS, seed=5),
        "temperatures": torch.full((NUM_TOKENS,), temperature),
    }
    counts = {"rl": 30.0, "ce": 7.0, "ref_kl": 11.0}
    states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    objective = PolicyGradient(VOCAB, build_token_loss(config))
    loss, reported = objective(
        states, lambda h: h @ head.T, batch({"rl": rl, "ce": ce, "ref_kl": ref_kl}, streams), counts
    )
    loss.backward()

    plain_states, plain_head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs = plain_logprobs(plain_states, plain_head, temperature)[tokens, TARGETS]
    of_rl = reference_loss(config, logprobs, sampler, streams["advantages"]) * rl
    of_ce = -plain_logprobs(plain_states, plain_head, 1.0)[tokens, TARGETS] * ce
    difference = streams["ref_logprobs"] - logprobs
    of_kl = (difference.exp() - 1 - difference) * ref_kl
    expected = of_rl.sum() / 30 + of_ce.sum() / 7 + of_kl.sum() / 11
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states.grad, plain_states.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.grad, plain_head.grad, rtol=1e-5, atol=1e-6)
    assert reported["loss/rl"].item() == pytest.approx(of_rl.sum().item() / 30, rel=1e-4)
    assert reported["loss/ref_kl"].item() == pytest.approx(of_kl.sum().item() / 11, rel=1e-4)
    log_ratio = (logprobs - sampler)[2:12].double()
    assert reported["mismatch_kl"].item() == pytest.approx(
        float((log_ratio.exp() - 1 - log_ratio).sum()) / 30, rel=1e-4
    )
    probabilities = plain_logprobs(hidden, weight, temperature)[2:12]
    entropy = -(probabilities.exp() * probabilities).sum() / 30
    assert reported["entropy"].item() == pytest.approx(entropy.item(), rel=1e-4)
    # Some tokens are outside the region, or nothing of it is tested here.
    assert reported["clip_fraction"].item() > 0


@pytest.mark.parametrize("count", [0, 9], ids=["nothing to train", "all components"])
def test_every_tensor_is_made_on_the_device_of_the_batch_and_not_on_a_default_one(count: int) -> None:
    hidden, weight = drawn(NUM_TOKENS, HIDDEN, seed=1), drawn(VOCAB, HIDDEN, seed=2)
    names = ("logprobs", "advantages", "ref_logprobs") if count else ()
    streams = {name: drawn(NUM_TOKENS, seed=3) for name in names}
    chosen = torch.arange(NUM_TOKENS) < count
    weights = {name: chosen.float() for name in (("rl", "ce", "ref_kl") if count else ("rl",))}
    row, counts = batch(weights, streams), {"rl": 9.0, "ce": 9.0, "ref_kl": 9.0}
    objective = PolicyGradient(VOCAB, build_token_loss(LOSSES[0]))
    expected, _ = objective(hidden, lambda h: h @ weight.T, row, counts)
    # A tensor that is made without a device has no memory now, and the first use of it fails.
    with torch.device("meta"):
        loss, reported = objective(hidden, lambda h: h @ weight.T, row, counts)
    assert torch.equal(loss, expected) and not any(value.is_meta for value in reported.values())


def test_the_log_probability_is_that_of_the_divided_logits() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(3, 1)
    found, entropies = token_statistics(
        logits, lambda h: h, torch.arange(3), torch.full((3,), 0.5), 3, logits_bytes=1
    )
    assert found.tolist() == pytest.approx([-0.1429, -2.1429, -4.1429], abs=1e-4)
    by_hand = -sum(math.exp(value) * value for value in found.tolist())
    assert entropies.tolist() == pytest.approx([by_hand] * 3, abs=1e-5)


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: config.type)
def test_a_token_without_weight_or_far_from_the_sampler_cannot_spoil_the_loss(config: LossConfig) -> None:
    rl = torch.zeros(NUM_TOKENS)
    rl[2:5] = 1.0
    logprobs = torch.full((NUM_TOKENS,), -1e4)
    logprobs[0] = float("nan")
    streams = {"logprobs": logprobs, "advantages": torch.full((NUM_TOKENS,), -1.0)}
    hidden = drawn(NUM_TOKENS, HIDDEN, seed=1)
    hidden[0] = float("nan")
    states, head = hidden.requires_grad_(), drawn(VOCAB, HIDDEN, seed=2)
    loss, reported = PolicyGradient(VOCAB, build_token_loss(config))(
        states, lambda h: h @ head.T, batch({"rl": rl}, streams), {"rl": 3.0, "ce": 1.0, "ref_kl": 1.0}
    )
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(value) for value in reported.values())
    assert states.grad is not None and torch.isfinite(states.grad[1:]).all()


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: config.type)
def test_a_row_without_loss_reports_the_same_names_and_sends_zero_gradients(config: LossConfig) -> None:
    states, head = (
        drawn(NUM_TOKENS, HIDDEN, seed=1).requires_grad_(),
        drawn(VOCAB, HIDDEN, seed=2).requires_grad_(),
    )
    objective, counts = PolicyGradient(VOCAB, build_token_loss(config)), {"rl": 1.0, "ce": 1.0, "ref_kl": 1.0}
    rl = torch.zeros(NUM_TOKENS)
    loss, empty = objective(states, lambda h: h @ head.T, batch({"rl": rl}, {}), counts)
    loss.backward()
    assert loss.item() == 0.0
    assert states.grad is not None and not states.grad.any()
    assert head.grad is not None and not head.grad.any()
    rl[1] = 1.0
    streams = {"logprobs": torch.zeros(NUM_TOKENS), "advantages": torch.ones(NUM_TOKENS)}
    _, full = objective(states, lambda h: h @ head.T, batch({"rl": rl}, streams), counts)
    assert empty.keys() == full.keys()


def test_weights_without_the_stream_they_need_are_refused() -> None:
    objective = PolicyGradient(VOCAB, build_token_loss(TrustRegionLossConfig()))
    with pytest.raises(ChannelError, match="'logprobs'"):
        objective(
            drawn(NUM_TOKENS, HIDDEN, seed=1),
            lambda h: h @ drawn(VOCAB, HIDDEN, seed=2).T,
            batch({"rl": torch.ones(NUM_TOKENS)}, {}),
            {"rl": 1.0, "ce": 1.0, "ref_kl": 1.0},
        )


OWN_LOSS = """
import torch

def reinforce(logprobs, sampler_logprobs, advantages):
    return -advantages * logprobs, {"own": (logprobs - sampler_logprobs).abs()}

def total(logprobs, sampler_logprobs, advantages):
    return -(advantages * logprobs).sum(), {}

def mean(logprobs, sampler_logprobs, advantages):
    return -advantages * logprobs, {"own": 0.5}

def alone(logprobs, sampler_logprobs, advantages):
    return -advantages * logprobs

def hides(logprobs, sampler_logprobs, advantages):
    return -advantages * logprobs, {"loss": logprobs, "entropy": logprobs}
"""


def test_a_loss_of_the_users_is_found_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_losses.py").write_text(OWN_LOSS)
    monkeypatch.chdir(tmp_path)
    hidden, head = drawn(NUM_TOKENS, HIDDEN, seed=1), drawn(VOCAB, HIDDEN, seed=2)
    streams = {"logprobs": torch.zeros(NUM_TOKENS), "advantages": drawn(NUM_TOKENS, seed=4)}
    counts = {"rl": float(NUM_TOKENS), "ce": 1.0, "ref_kl": 1.0}
    rows = batch({"rl": torch.ones(NUM_TOKENS)}, streams)
    objective = PolicyGradient(VOCAB, build_token_loss(CustomLossConfig(function="my_losses:reinforce")))
    loss, reported = objective(hidden, lambda h: h @ head.T, rows, counts)
    logprobs = plain_logprobs(hidden, head, 1.0)[torch.arange(NUM_TOKENS), TARGETS]
    assert loss.item() == pytest.approx(float(-(streams["advantages"] * logprobs).mean()), rel=1e-5)
    assert reported["own"].item() == pytest.approx(float(logprobs.abs().mean()), rel=1e-5)
    for name, words in (
        ("total", "returned a loss that is not a tensor of one number for each of the 19 tokens"),
        ("mean", "returned a value 'own' that is not a tensor of one number for each of the 19 tokens"),
        ("alone", "returned no pair of the tokens' losses and a dict of values to log"),
        # The run's own loss decides whether an update is finite.
        ("hides", "returned a value by the name entropy, loss, which is that of another metric"),
    ):
        wrong = PolicyGradient(VOCAB, build_token_loss(CustomLossConfig(function=f"my_losses:{name}")))
        with pytest.raises(ConfigError, match=words):
            wrong(hidden, lambda h: h @ head.T, rows, counts)
    with pytest.raises(ConfigError, match="my_losses:missing"):
        build_token_loss(CustomLossConfig(function="my_losses:missing"))
