"""Ctrl-C in the first moments of every command: one message, whatever was being imported."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_COMMANDS = {
    "launcher.sft:main": ("before training began", ["--help"]),
    "launcher.rl:main": ("before training began", ["--help"]),
    "launcher.parts:trainer": ("before training began", ["--help"]),
    "launcher.parts:orchestrator": ("before sampling began", ["--help"]),
    "launcher.parts:inference": ("before the policy server began", ["--help"]),
    "launcher.ckpt:main": ("", ["ls", "missing"]),
    "trainer.__main__:main": ("before training began", ["missing.toml", "missing"]),
    "orchestrator.__main__:main": ("before sampling began", ["missing.toml", "missing"]),
    "inference.__main__:main": ("before the policy server began", ["missing.toml", "missing"]),
}
"""Entry points, how their message ends, and words that would let them begin."""

# Sends the signal at the N-th import of this entry point.
_INTERRUPTED = """
import importlib, os, signal, sys
from contextlib import suppress
from importlib.abc import MetaPathFinder

module, _, function = sys.argv[1].partition(":")
instant = int(sys.argv[2])

sys.argv = ["command", *sys.argv[3:]]
main = getattr(importlib.import_module(module), function)

class Interrupting(MetaPathFinder):
    imports = 0
    def find_spec(self, fullname, path, target=None):
        self.imports += 1
        if self.imports == instant:
            with suppress(BaseException):  # as the import of a library may do with what a handler raises
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.exit(main())
"""


@pytest.mark.parametrize("command", _COMMANDS)
def test_ctrl_c_while_a_command_imports_its_libraries_is_one_message(command: str) -> None:
    ending, words = _COMMANDS[command]
    for instant in (1, 8, 40):
        arguments = [sys.executable, "-c", _INTERRUPTED, command, str(instant), *words]
        found = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        assert (found.returncode, found.stdout) == (130, ""), (instant, found.stderr)
        assert found.stderr == f"ended by SIGINT {ending}".rstrip() + "\n", instant


def test_until_they_are_in_charge_of_signals_commands_import_only_the_standard_library() -> None:
    modules = sorted({command.partition(":")[0] for command in _COMMANDS})
    code = (
        f"import importlib, sys\nknown = set(sys.modules)\nfor name in {modules}:\n"
        "    importlib.import_module(name)\n"
        "names = {name.partition('.')[0] for name in sys.modules.keys() - known}\n"
        "print(sorted(names - set(sys.stdlib_module_names)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "['contract', 'inference', 'launcher', 'orchestrator', 'trainer']", found


def test_every_command_of_the_package_is_among_them() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert {*project["scripts"].values()} <= {*_COMMANDS}
