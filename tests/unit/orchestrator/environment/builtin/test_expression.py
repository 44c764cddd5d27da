from __future__ import annotations

import random
from fractions import Fraction

import pytest

from orchestrator.environment.builtin.expression import MAX_LENGTH, evaluate


def _random_expression(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return str(rng.randint(0, 99))
    left, right = (_random_expression(rng, depth - 1) for _ in range(2))
    operator = rng.choice(["+", "-", "*", "//", "%"])
    return f"({left} {operator} {right})" if rng.random() < 0.5 else f"-{left} {operator} {right}"


def test_whole_numbers_are_those_of_python() -> None:
    checked = 0
    for seed in range(300):
        expression = _random_expression(random.Random(seed), 3)
        try:
            expected = str(eval(expression))
        except ZeroDivisionError:
            with pytest.raises(ValueError, match="division by zero"):
                evaluate(expression)
        else:
            checked += 1
            assert evaluate(expression) == expected
    assert checked > 150


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 / 3 * 3", "1"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 4", "0.25"),
        ("2 / 3", f"{float(Fraction(2, 3)):.10g}"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        (" +3 - -4\n", "7"),
        ("123456789 * 987654321", str(123456789 * 987654321)),
    ],
)
def test_fractions_are_exact_on_the_way(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "no arithmetic expression"),
        ("12 apples", "no arithmetic expression"),
        ("\x00", "no arithmetic expression"),
        ("(" * 190, "no arithmetic expression"),
        ("x", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("1j", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("[1][0]", "only numbers"),
        ("1 << 3", "only numbers"),
        ("~1", "only numbers"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "exponent"),
        ("2 ** 0.5", "exponent"),
        ("9 ** 99", "too large"),
        ("1e999", "too large"),
        ("1e300", "too large"),
        ("9" * 100, "too large"),
        ("1 +" * MAX_LENGTH, "more than 200 characters"),
    ],
)
def test_what_is_refused_is_said_in_words(expression: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate(expression)
