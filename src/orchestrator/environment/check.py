"""A check that an environment keeps the protocol, for the tests of whoever writes one.

Calls it as a worker does, on this process, with everything passing through JSON between calls; without time
limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.environment.base import Environment, Message
from orchestrator.environment.calls import Caller
from orchestrator.environment.wire import json_copy

ANSWERS = ("", "1", "I do not know.", "<tool_call>{}</tool_call>")
"""What the policy says where the caller does not care."""


def check_environment(
    environment: Environment, answers: Sequence[str | Message] = ANSWERS, num_tasks: int = 4
) -> list[dict[str, float]]:
    """Play every answer on some tasks, and check what the environment returns.

    Checks that tasks are the same at every call, that everything is JSON, that messages and rewards are what
    they must be, and that the same episode is worth the same again. Returns the rewards of all episodes, task
    by task and answer by answer, for checks of one's own.

    Args:
        answers: texts, or whole messages with `role: assistant`; an episode says the same in each of its
            turns.
        num_tasks: how many tasks to try; the first, the last and those between at equal distances.

    Raises:
        ProtocolError: the environment returned what it may not.
        AssertionError: a task or a reward differs at the second call.
        TypeError: a value is not JSON.
        Exception: whatever the environment raises.
    """
    caller = Caller(environment)
    try:
        description = json_copy(caller.describe())
        count = min(num_tasks, description["num_tasks"])
        last = description["num_tasks"] - 1
        indices = [last * k // max(1, count - 1) for k in range(count)]
        rewards = []
        for index in indices:
            task = json_copy(caller.task(index))
            assert task == json_copy(caller.task(index)), f"task({index}) differs at the second call"
            for answer in answers:
                played = [_play(caller, task, answer, description["max_turns"]) for _ in range(2)]
                assert played[0] == played[1], (
                    f"task {index}, answer {answer!r:.80}: the same episode is worth {played[0]} and then "
                    f"{played[1]}"
                )
                rewards.append(played[0])
        return rewards
    finally:
        caller.close()


def _play(caller: Caller, task: Any, answer: str | Message, max_turns: int) -> dict[str, float]:
    """One episode, in which the policy says `answer` in every turn."""
    turn = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    messages: list[Message] = json_copy(caller.start(json_copy(task)))
    state: dict[str, Any] = {}
    for number in range(max_turns):
        messages.append(json_copy(turn))
        if number + 1 == max_turns:
            break
        following, state = json_copy(caller.respond(json_copy(task), json_copy(messages), state))
        if following is None:
            break
        messages += following
    return caller.reward(json_copy(task), messages, state)
