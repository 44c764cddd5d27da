"""The rules of the house: sizes, the dependency rule, light imports, and shipped configurations that load."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.settings.load import load_settings
from launcher.rl_config import RLConfig
from trainer.config import SFTConfig

ROOT = Path(__file__).parents[2]
PYTHON_FILES = sorted(
    path for folder in ("src", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")
)
CONFIG_FILES = sorted((ROOT / "configs").rglob("*.toml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# "path" or "path::function" -> lines it may have. This list may only shrink: mend one, and its entry must go.
EXCEPTIONS: dict[str, int] = {}

# Packages that answer `--help` and `--dry-run`, or run without a model: none may load these when it is
# imported.
LIGHT_PACKAGES = ("contract", "telemetry", "launcher", "orchestrator", "trainer.config")
HEAVY_MODULES = ("torch", "transformers", "datasets", "accelerate", "wandb", "tensorboard")

# import-linter also sees imports inside functions, which are the right way to load a heavy library late: so
# this rule is about what really is loaded. One process imports all modules, as starting one for each takes
# too long.
_IMPORT_ALL = """
import importlib, json, pkgutil, sys
light, heavy = json.loads(sys.argv[1])
loaded, names = {}, []
for package in light:
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        continue
    found = [info.name for info in pkgutil.walk_packages(module.__path__, package + ".")]
    for name in [package, *found]:
        if not name.endswith(".__main__"):
            importlib.import_module(name)
            names.append(name)
            for other in heavy:
                if other in sys.modules:
                    loaded.setdefault(other, name)
print(json.dumps([loaded, names]))
"""


def _sizes() -> Iterator[tuple[str, int, int]]:
    """Name, lines and limit of every file and function."""
    for path in PYTHON_FILES:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        yield name, len(text.splitlines()), MAX_FILE_LINES
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{name}::{node.name}", node.end_lineno - node.lineno + 1, MAX_FUNCTION_LINES


def _imported(tree: ast.AST) -> set[str]:
    """Top-level names of all modules that are imported anywhere in a file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_files_and_functions_are_short() -> None:
    too_long = [
        f"{name} has {lines} lines, {limit} are allowed"
        for name, lines, limit in _sizes()
        if lines > EXCEPTIONS.get(name, limit)
    ]
    assert not too_long, "\n".join(too_long)


def test_an_exception_that_is_no_longer_needed_is_removed() -> None:
    sizes = {name: (lines, limit) for name, lines, limit in _sizes()}
    stale = [name for name, allowed in EXCEPTIONS.items() if name not in sizes or sizes[name][0] < allowed]
    assert not stale, f"lower or remove these entries of EXCEPTIONS: {stale}"


def test_the_dependency_rule_holds() -> None:
    command = [str(Path(sysconfig.get_path("scripts")) / "lint-imports"), "--no-logo", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_package_is_under_the_dependency_rule_and_in_the_wheel() -> None:
    packages = sorted(path.parent.name for path in (ROOT / "src").glob("*/__init__.py"))
    assert sorted(PROJECT["tool"]["importlinter"]["root_packages"]) == packages
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(wheel) == [f"src/{name}" for name in packages]


def test_every_library_that_the_packages_import_is_declared() -> None:
    named = [re.split(r"[^A-Za-z0-9_-]", text)[0] for text in PROJECT["project"]["dependencies"]]
    declared = {name.lower().replace("_", "-") for name in named}
    distributions = importlib.metadata.packages_distributions()
    packages = {path.parent.name for path in (ROOT / "src").glob("*/__init__.py")}
    undeclared = {}
    for path in (ROOT / "src").rglob("*.py"):
        for module in _imported(ast.parse(path.read_text())) - packages - sys.stdlib_module_names:
            owners = {name.lower().replace("_", "-") for name in distributions.get(module, [module])}
            if not owners & declared:
                undeclared[module] = str(path.relative_to(ROOT))
    assert not undeclared, f"add these to [project] dependencies: {undeclared}"


def test_light_packages_load_no_heavy_library() -> None:
    arguments = json.dumps([LIGHT_PACKAGES, HEAVY_MODULES])
    command = [sys.executable, "-c", _IMPORT_ALL, arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    loaded, names = json.loads(result.stdout)
    assert {
        "contract.errors",
        "telemetry.metrics",
        "launcher.rl",
        "orchestrator.cli",
        "trainer.config.run",
    } <= set(names)
    assert not loaded, "\n".join(f"{module} is loaded by importing {name}" for module, name in loaded.items())


def test_there_are_configurations_to_check() -> None:
    assert (
        ROOT / "configs/qwen3.toml" in CONFIG_FILES and ROOT / "configs/quickstart/sft.toml" in CONFIG_FILES
    )


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shipped_configuration_loads(path: Path) -> None:
    # Sources of tasks are what every RL run has, and no SFT run.
    config = RLConfig if "sources" in tomllib.loads(path.read_text()) else SFTConfig
    assert load_settings(config, ["@", str(path)], prog=path.name, description="").notices == []
