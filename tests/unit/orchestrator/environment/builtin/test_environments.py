from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.environment.base import Environment, Message
from orchestrator.environment.builtin.calculator import TOOL, Calculator
from orchestrator.environment.builtin.guess_number import GuessNumber
from orchestrator.environment.load import load_environment


def _says(content: str, **other: Any) -> Message:
    return {"role": "assistant", "content": content, **other}


def _rewards(environment: Environment, index: int, answer: str) -> dict[str, Any]:
    task = environment.task(index)
    found = environment.reward(task, [*environment.start(task), _says(answer)], {})
    assert isinstance(found, dict)
    return found


def _question(environment: Environment, index: int) -> str:
    [message] = environment.start(environment.task(index))
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize("unit", ["words", "letters"])
def test_reverse_text_wants_what_the_question_asks(unit: str) -> None:
    environment = load_environment("x", "reverse-text", {"unit": unit, "min_length": 3})
    for index in range(50):
        text = _question(environment, index).rpartition(": ")[2]
        parts = text.split() if unit == "words" else list(text)
        joint = " " if unit == "words" else ""
        right = joint.join(reversed(parts))
        assert _rewards(environment, index, f" {right}.\n") == {"reward": 1.0, "exact": 1.0}
        nearly = _rewards(environment, index, joint.join([*reversed(parts[1:]), "q"]))
        assert 0.5 <= nearly["reward"] < 1.0 and nearly["exact"] == 0.0
        assert _rewards(environment, index, "?!")["reward"] == 0.0


def test_sort_letters_wants_the_letters_in_the_order_of_the_alphabet() -> None:
    plain = load_environment("x", "sort-letters", {})
    other = load_environment("x", "sort-letters", {"alphabet": "zyx", "separator": ""})
    for index in range(50):
        letters = _question(plain, index).rpartition(": ")[2].split(" ")
        assert _rewards(plain, index, " ".join(sorted(letters))) == {"reward": 1.0, "exact": 1.0}
        assert _rewards(plain, index, "".join(sorted(letters)))["reward"] == 1.0
        assert 0 < _rewards(plain, index, "".join(sorted(letters)[:-1]))["reward"] < 1
        letters = list(_question(other, index).rpartition(": ")[2])
        assert _rewards(other, index, "".join(sorted(letters, reverse=True)))["reward"] == 1.0


def test_arithmetic_pays_for_the_right_number_and_for_its_form() -> None:
    environment = load_environment("x", "arithmetic", {"operators": "+-*", "digits": 3, "num_terms": 3})
    for index in range(50):
        expression = _question(environment, index).removeprefix("Compute ").partition(". ")[0]
        assert len(expression.split()) == 5
        value = eval(expression)
        assert _rewards(environment, index, str(value)) == {"reward": 1.0, "correct": 1.0, "format": 1.0}
        assert _rewards(environment, index, f"It is {value}")["reward"] == pytest.approx(0.9)
        assert _rewards(environment, index, str(value + 1))["reward"] == pytest.approx(0.1)
        assert _rewards(environment, index, f"not {value + 1}")["reward"] == 0.0


def _play_guesses(environment: GuessNumber, index: int, strategy: str) -> tuple[dict[str, float], list[str]]:
    """Guess by halving, counting up, or always wrong; returns the rewards and the environment's messages."""
    task = environment.task(index)
    messages = environment.start(task)
    words = messages[0]["content"].split()
    low, high = int(words[7]), int(words[9].rstrip("."))
    for turn in range(environment.max_turns):
        guess = (low + high) // 2 if strategy == "halve" else low
        if strategy == "wrong":
            guess = low if task["number"] != low else high
        messages.append(_says(str(guess)))
        answer = environment.respond(task, messages, {}) if turn + 1 < environment.max_turns else None
        if answer is None:
            break
        messages += answer
        if strategy == "halve":
            low, high = (guess + 1, high) if answer[0]["content"] == "Higher." else (low, guess - 1)
        elif strategy == "count":
            low += 1
    replies = [message["content"] for message in messages[1:] if message["role"] == "user"]
    return environment.reward(task, messages, {}), replies


@pytest.mark.parametrize("range_size", [2, 7, 8, 10, 100])
def test_guess_number_pays_halving_in_full(range_size: int) -> None:
    environment = GuessNumber(range_size=range_size)
    for index in range(40):
        rewards, _ = _play_guesses(environment, index, "halve")
        assert rewards["reward"] == rewards["found"] == 1.0


def test_guess_number_pays_less_for_later_turns_and_least_for_none() -> None:
    environment = GuessNumber(range_size=10, max_turns=10)
    by_turns: dict[float, set[float]] = {}
    for index in range(200):
        rewards, replies = _play_guesses(environment, index, "count")
        assert rewards["found"] == 1.0 and set(replies) <= {"Higher."}
        assert len(replies) == rewards["turns"] - 1
        by_turns.setdefault(rewards["turns"], set()).add(rewards["reward"])
    assert sorted(by_turns) == list(range(1, 11))
    found = [by_turns[turn].pop() for turn in range(1, 11)]
    assert not any(by_turns.values())
    assert found[:4] == [1.0] * 4 and found[4:] == sorted(set(found[4:]), reverse=True) and found[-1] == 0.5
    for index in range(20):
        rewards, _ = _play_guesses(environment, index, "wrong")
        assert rewards["found"] == 0.0 and 0.0 <= rewards["reward"] < 0.3


def test_guess_number_asks_again_for_what_is_no_guess() -> None:
    environment = GuessNumber()
    task = {"low": 5, "high": 14, "number": 9}
    for answer in ("", "fish", "4", "15", "9.5"):
        [reply] = environment.respond(task, [_says(answer)], {}) or []
        assert reply["content"] == "Answer with one number from 5 to 14."
        assert environment.reward(task, [_says(answer)], {})["reward"] == 0.0


def _call(expression: Any, name: str = "calculate", **other: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {"expression": expression}}, **other}


@pytest.mark.parametrize("form", ["object", "text", "flat", "written"])
def test_calculator_computes_a_call_in_any_form(form: str) -> None:
    environment = Calculator()
    for index in range(20):
        task = environment.task(index)
        question = _question(environment, index)
        expression = question.removeprefix("What is ").partition("?")[0]
        value = str(eval(expression))
        call = _call(expression, id="call00001")
        if form == "text":
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if form == "flat":
            call = call["function"] | {"id": "call00001"}
        if form == "written":
            body = json.dumps(call["function"])
            messages = [_says(f"Well.<tool_call>\n{body}\n</tool_call>")]
            expected: Message = {"role": "user", "content": f"<tool_response>{value}</tool_response>"}
        else:
            messages = [_says("", tool_calls=[call])]
            expected = {"role": "tool", "content": value, "name": "calculate", "tool_call_id": "call00001"}
        state: dict[str, Any] = {}
        replies = environment.respond(task, messages, state) or []
        assert replies == [expected]
        messages = [*messages, *replies, _says(f"{value}.")]
        assert environment.respond(task, messages, state) is None
        assert environment.reward(task, messages, state) == {"reward": 1.0, "correct": 1.0, "calls": 1.0}
        assert environment.reward(task, [*messages[:-1], _says("?")], state)["reward"] == 0.2


def test_calculator_pays_little_for_a_call_and_nothing_for_none() -> None:
    environment = Calculator()
    task = {"expression": "6 * 7", "answer": "42"}
    state: dict[str, Any] = {}
    turn = _says("42", tool_calls=[_call("6 + 7")])
    environment.respond(task, [turn], state)
    # The last turn is a call: what it says beside the call is no answer.
    assert environment.reward(task, [turn], state) == {"reward": 0.1, "correct": 0.0, "calls": 1.0}
    assert environment.reward(task, [_says("41")], {})["reward"] == 0.0
    assert environment.reward(task, [_says("42")], {})["reward"] == 1.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (_call("1 +"), "no arithmetic expression"),
        (_call("1 / 0"), "division by zero"),
        (_call("x + 1"), "only numbers"),
        (_call(7), '{"expression": "..."}'),
        (_call("1", name="compute"), "no tool 'compute'"),
        ({"function": {"name": "calculate", "arguments": "{"}}, "not valid JSON"),
        ({"function": {"name": "calculate", "arguments": [1]}}, '{"expression": "..."}'),
        ({"function": {"name": "calculate"}}, '{"expression": "..."}'),
        ({"function": 3}, "not valid JSON"),
        ({}, "no tool 'None'"),
        (None, "not valid JSON"),
    ],
)
def test_calculator_tells_the_policy_what_is_wrong_with_a_call(call: Any, words: str) -> None:
    environment, state = Calculator(), {}
    [reply] = environment.respond({}, [_says("", tool_calls=[call])], state) or []
    assert reply["role"] == "tool" and reply["content"].startswith("Error: ") and words in reply["content"]
    written = call if isinstance(call, str) else json.dumps(call)
    [reply] = environment.respond({}, [_says(f"<tool_call>{written}</tool_call>")], state) or []
    assert reply["role"] == "user" and words in reply["content"]
    assert state == {}


def test_calculator_answers_a_call_that_never_closes_and_bounds_their_number() -> None:
    environment = Calculator()
    [reply] = environment.respond({}, [_says("<tool_call>{'a'")], {}) or []
    assert "not valid JSON" in reply["content"]
    replies = environment.respond({}, [_says("", tool_calls=[_call("1")] * 6)], {}) or []
    assert [reply["content"] for reply in replies[:5]] == ["1"] * 4 + ["Error: at most 4 calls in one turn"]
    assert len(replies) == 6


def test_the_schema_names_what_the_calculator_takes() -> None:
    assert Calculator().tools == (TOOL,)
    function = TOOL["function"]
    assert function["name"] == "calculate" and function["parameters"]["required"] == ["expression"]
