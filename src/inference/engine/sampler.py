"""Drawing tokens: one uniform number per token, and the inverse of the cumulative distribution.

A row's token and log-probability depend on the row alone. The uniform number of a token is a function of the
sequence's seed and the token's index, so no state is kept, and a sequence that is drawn again draws the same.

Legend: B rows of a step, R rows with top-k or top-p, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

_MASK_64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """A bijection of 64-bit numbers that looks random: the output function of SplitMix64 (Steele, Lea, Flood
    2014).
    """
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def stream_of(seed: int) -> int:
    """Where the random numbers of `seed` begin. Neighbouring seeds begin far from each other."""
    return mix(mix(seed & _MASK_64) + _GAMMA)


def uniforms(streams: list[int], indices: list[int]) -> np.ndarray:
    """Random numbers [B] in [0, 1), float64: those of token `indices[i]` of `streams[i]` (SplitMix64)."""
    index_B = np.array(indices, dtype=np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        value_B = np.array(streams, dtype=np.uint64) + index_B * np.uint64(_GAMMA)
        value_B = (value_B ^ (value_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value_B = (value_B ^ (value_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value_B ^= value_B >> np.uint64(31)
    # 52 bits: the largest number, times any total, still rounds to less than the total.
    return (value_B >> np.uint64(12)).astype(np.float64) * 2.0**-52


@torch.inference_mode()
def draw(
    logits_BV: torch.Tensor,
    uniforms_B: torch.Tensor,
    temperatures_B: torch.Tensor,
    top_k: dict[int, int],
    top_p: dict[int, float],
    greedy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token of each row.

    Args:
        logits_BV: float32; minus infinity excludes a token.
        uniforms_B: float64 in [0, 1).
        temperatures_B: float32; 0 takes the most likely token of the undivided logits, whatever top-k and
            top-p are.
        top_k: of the rows that have one: only so many most likely tokens are drawn from.
        top_p: of the rows that have one: of those, only the fewest most likely tokens that hold this
            probability. Among equally likely tokens, those with lower ids come first.
        greedy: whether any temperature is 0.

    Returns:
        Tokens [B], and log-probabilities [B] in float32 of the distribution drawn from. The log-probability
        is NaN where the logits hold NaN or plus infinity.
    """
    if greedy:
        is_greedy_B = temperatures_B == 0
        scaled_BV = logits_BV / torch.where(is_greedy_B, 1.0, temperatures_B)[:, None]
    else:
        is_greedy_B = None
        scaled_BV = logits_BV / temperatures_B[:, None]
    rows = sorted(top_k.keys() | top_p.keys())
    if rows:
        kept_RV = _keep(
            scaled_BV[rows], [top_k.get(row, 0) for row in rows], [top_p.get(row, 1.0) for row in rows]
        )
        scaled_BV[rows] = scaled_BV[rows].masked_fill_(~kept_RV, float("-inf"))
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    # In float64, or the rounding of a long sum would take or give probability to the tokens at its end.
    cumulative_BV = torch.cumsum(logprobs_BV.exp(), dim=-1, dtype=torch.float64)
    points_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
    # The first token whose cumulative probability exceeds the point: never one of probability zero.
    tokens_B = torch.searchsorted(cumulative_BV, points_B1, right=True)[:, 0]
    tokens_B = tokens_B.clamp_(max=logits_BV.shape[1] - 1)
    if is_greedy_B is not None:
        tokens_B = torch.where(is_greedy_B, logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def _keep(scaled_RV: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """Which tokens [R, V] remain; 0 and 1.0 keep all."""
    vocab_size = scaled_RV.shape[1]
    device = scaled_RV.device
    sorted_RV, order_RV = torch.sort(scaled_RV, dim=-1, descending=True, stable=True)
    k_R1 = torch.tensor([k or vocab_size for k in top_k], device=device)[:, None]
    kept_RV = torch.arange(vocab_size, device=device)[None] < k_R1
    probabilities_RV = torch.softmax(sorted_RV.masked_fill(~kept_RV, float("-inf")), dim=-1)
    before_RV = torch.cumsum(probabilities_RV, dim=-1, dtype=torch.float64) - probabilities_RV
    p_R1 = torch.tensor(top_p, dtype=torch.float64, device=device)[:, None]
    kept_RV &= (before_RV < p_R1) | (p_R1 >= 1.0)
    # Without this a tiny top_p would leave nothing where rounding puts the first sum above zero.
    kept_RV[:, 0] = True
    return torch.zeros_like(kept_RV).scatter_(1, order_RV, kept_RV)
