"""Drawing: against a plain loop over sorted probabilities."""

from __future__ import annotations

import math
import random

import torch

from inference.engine.sampler import draw, stream_of, uniforms


def plain_distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities that remain, in Python floats."""
    scaled = [value / temperature for value in logits]
    highest = max(scaled)
    weights = [math.exp(value - highest) for value in scaled]
    order = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    kept = order[: top_k or len(order)]
    total = math.fsum(weights[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if nucleus and mass >= top_p:
            break
        nucleus.append(token)
        mass += weights[token] / total
    total = math.fsum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


def plain_draw(probabilities: list[float], uniform: float) -> int:
    mass = 0.0
    for token, probability in enumerate(probabilities):
        mass += probability
        if uniform < mass:
            return token
    raise AssertionError("the probabilities sum to less than the number")


CASES = [
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (1.3, 5, 1.0),
    (1.0, 0, 0.6),
    (0.8, 20, 0.9),
    (2.0, 1, 1.0),
    (1.0, 0, 1e-9),
]


def test_tokens_and_log_probabilities_are_those_of_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((len(CASES), 101), generator=generator) * 3
    rng = random.Random(4)
    for _ in range(40):
        numbers = [rng.random() for _ in CASES]
        tokens, logprobs = draw(
            logits,
            torch.tensor(numbers, dtype=torch.float64),
            torch.tensor([case[0] for case in CASES]),
            {row: case[1] for row, case in enumerate(CASES) if case[1]},
            {row: case[2] for row, case in enumerate(CASES) if case[2] < 1},
            greedy=False,
        )
        for row, case in enumerate(CASES):
            expected = plain_distribution(logits[row].tolist(), *case)
            assert tokens[row] == plain_draw(expected, numbers[row])
            assert abs(logprobs[row].item() - math.log(expected[int(tokens[row])])) < 1e-5


def test_among_equal_logits_the_lower_ids_are_kept() -> None:
    logits = torch.zeros((1, 50))
    seen = set()
    for step in range(200):
        number = torch.tensor([step / 200], dtype=torch.float64)
        tokens, logprobs = draw(logits, number, torch.ones(1), {0: 4}, {}, greedy=False)
        seen.add(int(tokens))
        assert abs(logprobs.item() - math.log(1 / 4)) < 1e-6
    assert seen == {0, 1, 2, 3}


def test_temperature_zero_takes_the_most_likely_token_and_the_undivided_softmax() -> None:
    logits = torch.randn((2, 30), generator=torch.Generator().manual_seed(5))
    tokens, logprobs = draw(
        logits, torch.full((2,), 0.999, dtype=torch.float64), torch.tensor([0.0, 1.0]), {}, {}, greedy=True
    )
    assert tokens[0] == logits[0].argmax()
    assert torch.allclose(logprobs[0], torch.log_softmax(logits[0].double(), -1).max().float(), atol=1e-6)
    assert tokens[1] == plain_draw(plain_distribution(logits[1].tolist(), 1.0, 0, 1.0), 0.999)


def test_excluded_tokens_are_never_drawn_even_at_the_ends_of_the_distribution() -> None:
    logits = torch.full((2, 8), float("-inf"))
    logits[:, 3], logits[:, 5] = 0.0, 1.0
    numbers = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    tokens, _ = draw(logits, numbers, torch.ones(2), {}, {}, greedy=False)
    assert tokens.tolist() == [3, 5]


def test_logits_that_are_not_finite_give_a_log_probability_that_is_none() -> None:
    logits = torch.zeros((3, 8))
    logits[1, 2] = float("nan")
    logits[2, 2] = float("inf")
    _, logprobs = draw(
        logits, torch.full((3,), 0.5, dtype=torch.float64), torch.ones(3), {}, {}, greedy=False
    )
    assert logprobs.isfinite().tolist() == [True, False, False]


def test_random_numbers_depend_on_seed_and_index_alone_and_are_uniform() -> None:
    streams = [stream_of(seed) for seed in range(100)]
    table = [uniforms(streams, [index] * 100) for index in range(200)]
    assert table[17][42] == uniforms([streams[42]], [17])[0]
    numbers = torch.tensor([value for row in table for value in row.tolist()], dtype=torch.float64)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(numbers.unique()) == len(numbers)
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    # Chi-square with 19 degrees of freedom: above 43.8 once in a thousand.
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
    grid = numbers.view(200, 100)
    for first, second in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        pair = torch.stack([first.flatten(), second.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.03
