"""Environments that behave and ones that do not, for tests of the pool and of whole runs.

Each is one class with as few parts as it takes; sources name them as `tests.support.environments:NAME`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any

from orchestrator.environment import Environment, Message
from orchestrator.environment.builtin.sort_letters import SortLetters
from orchestrator.environment.wire import encode_frame

_RETURNED = {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None, "keys": {"a": 1.0}}


class Echo(Environment):
    """Task i asks for the text of i, for a reward of 1; `offset` moves the tasks."""

    def __init__(self, num_tasks: int = 100, offset: int = 0) -> None:
        self.num_tasks = num_tasks
        self.offset = offset

    def __len__(self) -> int:
        return self.num_tasks

    def task(self, index: int) -> Mapping[str, Any]:
        return {"answer": str(index + self.offset)}

    def start(self, task: Mapping[str, Any]) -> list[Message]:
        return [{"role": "user", "content": f"Say {task['answer']}."}]

    def reward(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
        return 1.0 if messages[-1]["content"] == task["answer"] else 0.0


class AsyncEcho(Echo):
    """Echo with coroutines."""

    async def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> list[Message] | None:
        await asyncio.sleep(0)
        return None

    async def reward(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return Echo.reward(self, task, messages, state)


class Counting(Echo):
    """Three turns; the state counts them, and the reward is that count by name."""

    max_turns = 3

    def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> list[Message] | None:
        state["turns"] = state.get("turns", 0) + 1
        return [{"role": "user", "content": f"again, {state['turns']}"}] if state["turns"] < 3 else None

    def reward(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
        return {"reward": 0.5, "turns": state["turns"]}


class Rounds(SortLetters):
    """Three turns, each with letters to sort; between them tool results and questions. What a turn says never
    ends it. The reward is the mean of what `sort-letters` gives each turn.
    """

    max_turns = 3

    def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> list[Message]:
        state["rewards"] = [*state.get("rewards", []), self._reward(task, messages)]
        return [{"role": "tool", "content": f"{state['rewards'][-1]:.3f}"}, *self.start(task)]

    def reward(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
        rewards = [*state.get("rewards", []), self._reward(task, messages)]
        return {"reward": sum(rewards) / len(rewards), "turns": len(rewards)}

    def _reward(self, task: Mapping[str, Any], messages: list[Message]) -> float:
        return super().reward(task, messages, {})["reward"]


class Checksum(Echo):
    """A reward by the checksum of what the policy said, so that no two episodes have the same.

    Args:
        num_turns: what a turn says never ends an episode before these.
    """

    def __init__(self, num_turns: int = 1) -> None:
        super().__init__()
        self.max_turns = num_turns

    def respond(
        self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]
    ) -> list[Message]:
        return [{"role": "user", "content": "Again."}]

    def reward(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        return zlib.crc32(" ".join(said).encode()) / 2**32


class Naughty(Echo):
    """Does in `reward` what the policy's last message tells it to; otherwise Echo.

    `hang` and `sleep SECONDS` block, `hang with child` also leaves a process that `state["pid_file"]` names
    (and so does `start`, which goes on), `twice` goes on in a forked process, too, `forge` answers a call
    that nobody made, `async hang` awaits for ever, `raise`, `quit` (sys.exit), `exit CODE`, `segfault` and
    `signal N` end, `interrupt` is Ctrl-C, `print` writes to standard output, `fork` leaves a process that
    holds every descriptor, `thread` says whether this is the main one, `pid` is the reward of its process
    number.
    """

    def reward(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
        order, _, argument = messages[-1]["content"].partition(" ")
        if order == "start" or (order == "hang" and argument):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
            with open(state["pid_file"], "w") as file:
                file.write(str(child.pid))
        if order == "hang":
            while True:
                time.sleep(0.01)
        if order == "async":
            return self._hang()
        if order == "return":
            return _RETURNED[argument]
        return getattr(self, f"_{order}", lambda _: Echo.reward(self, task, messages, state))(argument)

    async def _hang(self) -> float:
        await asyncio.Event().wait()
        return 0.0

    def _sleep(self, argument: str) -> float:
        time.sleep(float(argument))
        return 1.0

    def _raise(self, argument: str) -> float:
        raise LookupError("no such answer")

    def _quit(self, argument: str) -> float:
        sys.exit(3)

    def _exit(self, argument: str) -> float:
        os._exit(int(argument))

    def _segfault(self, argument: str) -> float:
        os.kill(os.getpid(), signal.SIGSEGV)
        return 0.0

    def _signal(self, argument: str) -> float:
        os.kill(os.getpid(), int(argument))
        return 0.0

    def _interrupt(self, argument: str) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    def _print(self, argument: str) -> float:
        print("printed by an environment", flush=True)
        os.write(1, b"written by an environment\n")
        return 1.0

    def _fork(self, argument: str) -> float:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        os._exit(1)

    def _twice(self, argument: str) -> float:
        os.fork()
        return 1.0

    def _forge(self, argument: str) -> float:
        for path in os.scandir("/proc/self/fd"):
            if os.readlink(path.path).startswith("socket:"):
                os.write(int(path.name), encode_frame([123456, None, {"reward": 1.0}, 0.0]))
        return 1.0

    def _thread(self, argument: str) -> float:
        return float(threading.current_thread() is threading.main_thread())

    def _pid(self, argument: str) -> float:
        return float(os.getpid())


class StartsOnce(Echo):
    """Its constructor works while `path` does not exist, and makes it; then it ends the process."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if os.path.exists(path):
            os._exit(7)
        open(path, "w").close()

    def reward(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
        os._exit(8)


class Lottery(Echo):
    """Each episode has another reward, which takes `seconds`: every group has a signal."""

    def __init__(self, num_tasks: int = 100, seconds: float = 0.0) -> None:
        super().__init__(num_tasks)
        self.seconds = seconds

    def reward(self, task: Mapping[str, Any], messages: list[Message], state: dict[str, Any]) -> Any:
        time.sleep(self.seconds)
        return random.random()


class BadStart(Echo):
    """Fails in the constructor as `how` says: `raise`, `refuse`, `exit`, `hang`, or differs with `differ`."""

    def __init__(self, how: str = "raise") -> None:
        super().__init__(os.getpid() if how == "differ" else 1)
        if how == "raise":
            raise OSError("no data")
        if how == "refuse":
            raise ValueError("how must be something else")
        if how == "exit":
            os._exit(5)
        while how == "hang":
            time.sleep(0.01)


class NotJson(Echo):
    """Its tasks hold what JSON cannot."""

    def task(self, index: int) -> Mapping[str, Any]:
        return {"answer": object()}


class Unsteady(Echo):
    """Another task at every call."""

    def task(self, index: int) -> Mapping[str, Any]:
        return {"answer": str(time.perf_counter_ns())}


def make_echo(num_tasks: int = 3) -> Environment:
    """An environment from a function."""
    return Echo(num_tasks)


NOT_CALLABLE = 3
