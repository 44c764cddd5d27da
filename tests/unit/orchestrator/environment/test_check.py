from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.environment import Environment, Message
from orchestrator.environment.calls import ProtocolError
from orchestrator.environment.check import check_environment
from tests.support.environments import AsyncEcho, Counting, Echo, Naughty, NotJson, Unsteady


class _Given(Echo):
    """Returns what it is given; `values` maps a function to it."""

    def __init__(self, max_turns: Any = 2, tools: Any = (), num_tasks: int = 2, **values: Any) -> None:
        super().__init__(num_tasks)
        self.max_turns, self.tools, self.values = max_turns, tools, values

    def task(self, index: int) -> Any:
        return self.values.get("task", Echo.task(self, index))

    def start(self, task: Mapping[str, Any]) -> Any:
        return self.values.get("start", Echo.start(self, task))

    def respond(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
        if "state" in self.values:
            state["x"] = self.values["state"]
        return self.values.get("respond")

    def reward(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
        return self.values.get("reward", 1.0)


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("environment", [Echo(5), AsyncEcho(5)])
def test_a_good_environment_passes_sync_or_async(environment: Environment) -> None:
    rewards = check_environment(environment, answers=["0", "4"], num_tasks=2)
    assert rewards == [{"reward": 1.0}, {"reward": 0.0}, {"reward": 0.0}, {"reward": 1.0}]


def test_an_episode_of_several_turns_is_played_to_its_end() -> None:
    # The environment is not asked after the last turn that is allowed: it has counted two of three.
    assert check_environment(Counting(1), answers=["x"]) == [{"reward": 0.5, "turns": 2.0}]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (_Given(num_tasks=0), r"len\(_Given\) is 0"),
        (_Given(num_tasks=50_000_001), r"len\(_Given\) is 50000001; at most 50000000"),
        (_Given(max_turns=0), "max_turns is 0"),
        (_Given(max_turns=True), "max_turns is True"),
        (_Given(tools={"name": "x"}), "tools must be a list"),
        (_Given(tools=["x"]), "tools must hold"),
        (_Given(task=[1]), r"task\(0\) must return a mapping, not list"),
        (_Given(start="hello"), "start must return a list of messages, not str"),
        (_Given(start=[]), "start returned no message"),
        (_Given(start=["hello"]), "a mapping with a `role`"),
        (_Given(start=[{"role": "robot", "content": "x"}]), "a mapping with a `role`"),
        (_Given(start=_user(None)), "`content` of a message must be a str"),
        (_Given(start=[*_user("x"), {"role": "assistant", "content": "y"}]), "the policy's turn"),
        (_Given(respond=[]), "respond returned no message; respond returns None"),
        (_Given(respond={"role": "user"}), "respond must return a list of messages"),
        (_Given(reward=None), "gave None for 'reward'"),
        (_Given(reward="1.0"), "gave str"),
        (_Given(reward=float("nan")), "must be finite"),
        (_Given(reward=-1e31), r"a reward must be finite, from -1e\+30 to 1e\+30"),
        (_Given(reward={"reward": 1.0, "other": float("inf")}), "'other'; a reward must be finite"),
        (_Given(reward={"score": 1.0}), r"the key 'reward'; it returned the keys \['score'\]"),
    ],
)
def test_each_breach_of_the_protocol_is_named(environment: Environment, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        check_environment(environment)


@pytest.mark.parametrize("environment", [NotJson(), _Given(state=object()), _Given(start=[{"role": "user"}])])
def test_values_that_are_not_json_or_not_whole_are_found(environment: Environment) -> None:
    with pytest.raises((TypeError, ProtocolError)):
        check_environment(environment)


def test_tasks_and_rewards_that_change_are_found() -> None:
    with pytest.raises(AssertionError, match=r"task\(0\) differs"):
        check_environment(Unsteady())

    class Moody(Echo):
        calls = 0

        def reward(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
            self.calls += 1
            return float(self.calls)

    with pytest.raises(AssertionError, match="the same episode is worth"):
        check_environment(Moody())


@pytest.mark.parametrize(("reward", "expected"), [(True, 1.0), (3, 3.0), ({"reward": False, "n": 2}, 0.0)])
def test_every_kind_of_number_is_a_reward(reward: Any, expected: float) -> None:
    [found] = check_environment(_Given(reward=reward, num_tasks=1), answers=["x"])
    assert found["reward"] == expected and type(found["reward"]) is float


def test_scalars_of_numpy_are_rewards() -> None:
    import numpy

    values = [numpy.float32(0.5), numpy.int64(2), numpy.array(1.5)]
    found = [check_environment(_Given(reward=value, num_tasks=1), answers=["x"])[0] for value in values]
    assert found == [{"reward": 0.5}, {"reward": 2.0}, {"reward": 1.5}]


def test_what_the_environment_raises_is_passed_on() -> None:
    with pytest.raises(LookupError, match="no such answer"):
        check_environment(Naughty(), answers=["raise"])


@pytest.mark.parametrize(
    ("method", "words"),
    [("__len__", "define __len__"), ("task", "define task"), ("start", "start"), ("reward", "define reward")],
)
def test_a_function_that_is_missing_is_named(method: str, words: str) -> None:
    kept = {
        name: value
        for name, value in vars(Echo).items()
        if name in ("__init__", "__len__", "task", "start", "reward") and name != method
    }
    incomplete = type("Incomplete", (Environment,), kept)
    with pytest.raises(TypeError, match=words):
        check_environment(incomplete())
