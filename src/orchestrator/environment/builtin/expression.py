"""The value of an arithmetic expression of a policy: exact, and bounded in time and size."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 200
"""Longest expression, in characters."""
MAX_BITS = 256
"""Largest numerator or denominator on the way, in bits."""

_ALLOWED = "only numbers, + - * / // % ** and parentheses are allowed"
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> str:
    """The value: whole numbers exactly, others with 10 digits.

    Takes numbers, `+ - * / // % **` and parentheses.

    Raises:
        ValueError: what is wrong with the expression, in words for a policy.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("this is no arithmetic expression") from error
    try:
        value = _value(tree.body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("the number is too large") from error


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        if isinstance(node.value, bool):
            raise ValueError(_ALLOWED)
        # The decimal digits as written, rather than the binary number nearest to them; 1e999 overflows.
        return _bounded(Fraction(str(node.value)) if math.isfinite(node.value) else Fraction(node.value))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(Fraction(_BINARY[type(node.op)](_value(node.left), _value(node.right))))
    raise ValueError(_ALLOWED)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_BITS:
        raise ValueError(f"an exponent must be a whole number from -{MAX_BITS} to {MAX_BITS}")
    return _bounded(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the number is too large")
    return value
