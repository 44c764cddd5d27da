from __future__ import annotations

import json
from typing import Any

import pytest

from contract.errors import ConfigError
from orchestrator.environment.base import Environment
from orchestrator.environment.builtin.generated import answer_of, last_number, similarity
from orchestrator.environment.check import check_environment
from orchestrator.environment.load import BUILT_IN, load_environment

# Few possible tasks each, so that the splits would meet if they could.
_SMALL: dict[str, dict[str, Any]] = {
    "reverse-text": {"unit": "letters", "alphabet": "abc", "max_length": 4},
    "sort-letters": {"alphabet": "abc", "max_length": 4},
    "arithmetic": {"digits": 1},
    "guess-number": {"range_size": 2},
    "calculator": {"digits": 1},
}
_ODD_ANSWERS = [
    "",
    " \n",
    "42",
    "-0",
    "9" * 10_000,
    "x" * 5_000,
    "<tool_call>",
    "1e999",
    "\x00",
    "ü \U0001f600",
]


def _made(name: str, **settings: Any) -> Environment:
    return load_environment("source", name, settings)


def _contents(environment: Environment, count: int) -> list[str]:
    return [json.dumps(environment.task(index), sort_keys=True) for index in range(count)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_task_is_in_both_splits_whatever_the_seed(name: str) -> None:
    train = {text for seed in (0, 1) for text in _contents(_made(name, seed=seed, **_SMALL[name]), 1000)}
    test = {
        text
        for seed in (0, 1)
        for text in _contents(_made(name, seed=seed, split="test", **_SMALL[name]), 1000)
    }
    assert len(train) > 10 and len(test) > 3
    assert not train & test


@pytest.mark.parametrize("name", BUILT_IN)
def test_tasks_depend_on_seed_and_index_only(name: str) -> None:
    tasks = _contents(_made(name), 50)
    assert tasks == _contents(_made(name, num_tasks=50), 50)
    assert tasks != _contents(_made(name, seed=1), 50)
    assert len(set(tasks)) > 40


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_protocol_is_kept_for_any_answer_of_a_policy(name: str) -> None:
    rewards = check_environment(_made(name), answers=_ODD_ANSWERS)
    assert all(0.0 <= reward["reward"] < 1.0 for reward in rewards)


@pytest.mark.parametrize("name", BUILT_IN)
def test_tasks_end_where_they_end(name: str) -> None:
    environment = _made(name, num_tasks=3)
    assert len(environment) == 3 and environment.task(2)
    for index in (-1, 3):
        with pytest.raises(IndexError, match="of 3"):
            environment.task(index)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("arithmetic", {"split": "valid"}, r"settings.split = 'valid'.*train, test"),
        ("arithmetic", {"num_tasks": 0}, "settings.num_tasks = 0.*from 1"),
        ("arithmetic", {"seed": True}, "settings.seed = True"),
        ("arithmetic", {"digits": "2"}, "settings.digits = '2'.*from 1 to 6"),
        ("arithmetic", {"operators": "+/"}, r"settings.operators = '\+/'"),
        ("arithmetic", {"operators": ""}, "settings.operators = ''"),
        ("calculator", {"max_turns": 1}, "settings.max_turns = 1"),
        ("guess-number", {"range_size": 1}, "settings.range_size = 1"),
        ("reverse-text", {"min_length": 5}, "min_length = 5 is above settings.max_length = 4"),
        ("reverse-text", {"unit": "lines"}, "words, letters"),
        ("sort-letters", {"alphabet": "aab"}, "settings.alphabet = 'aab'"),
        ("sort-letters", {"alphabet": "ac", "min_length": 1, "max_length": 1, "split": "test"}, "no task"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"source 'source'.*{words}"):
        _made(name, **settings)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("The answer is -7.", -7),
        ("12 + 30 = 42", 42),
        ("12-7", 7),
        ("1,234,567", 1234567),
        ("1,23", 23),
        ("007", 7),
        ("3.5", None),
        ("none", None),
        ("", None),
        ("9" * 5000, None),
        ("٣", None),
    ],
)
def test_the_last_whole_number_of_a_text(text: str, number: int | None) -> None:
    assert last_number(text) == number


def test_an_answer_is_the_last_turn_without_its_wrapping() -> None:
    assert (
        answer_of([{"role": "user", "content": "x"}, {"role": "assistant", "content": ' "a b."\n'}]) == "a b"
    )
    assert answer_of([{"role": "assistant", "content": None}]) == ""
    assert answer_of([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]) == ""


def test_similarity_is_twice_the_common_part_over_both_lengths() -> None:
    assert similarity("abcd", "abcd") == 1.0
    assert similarity("abxx", "abcd") == 2 * 2 / 8
    assert similarity(["b", "a", "c"], ["a", "b", "c"]) == 2 * 2 / 6
    assert similarity("", "abc") == 0.0


def test_similarity_falls_with_what_is_written_beside_the_answer() -> None:
    values = [similarity("abcd" + "x" * length, "abcd") for length in (0, 1, 10, 90, 100, 1000, 100_000)]
    assert values == sorted(set(values), reverse=True)
