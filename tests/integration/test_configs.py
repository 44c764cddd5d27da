"""Every configuration that is shipped is valid, and the commands answer."""

from __future__ import annotations

import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.integration.place import Place
from tests.support.runs import Command

REPOSITORY = Path(__file__).parents[2]
CONFIGS = sorted(
    path
    for path in (REPOSITORY / "configs").rglob("*.toml")
    # Those of RL runs, which have sources of tasks, are checked where `rl` is.
    if "sources" not in tomllib.loads(path.read_text())
)


def test_there_are_configurations_to_check() -> None:
    names = {str(path.relative_to(REPOSITORY)) for path in CONFIGS}
    assert {"configs/qwen3.toml", "configs/quickstart/sft.toml"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_shipped_configuration_is_valid_and_resolves_to_one_that_is(place: Place, path: Path) -> None:
    finished = place.nursery.run(["@", str(path), "--dry-run", "--output-dir", str(place.output_dir)])
    assert finished.code == 0, finished.output
    (resolved,) = place.output_dir.rglob("sft.toml")
    again = place.nursery.run(["@", str(resolved), "--dry-run", "--output-dir", str(place.root / "again")])
    assert again.code == 0, again.output
    (once_more,) = (place.root / "again").rglob("sft.toml")
    first, second = (tomllib.loads(file.read_text()) for file in (resolved, once_more))
    assert {**first, "output_dir": ""} == {**second, "output_dir": ""}


@pytest.mark.parametrize(
    "flags", [["--help"], ["@", "configs/quickstart/sft.toml", "--dry-run"]], ids=["help", "dry-run"]
)
def test_the_command_answers_without_importing_torch(
    place: Place, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import sys; from launcher.sft import main; code = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    if flags[0] == "--help":
        program = program.replace(
            "code = main(sys.argv[1:])",
            "\ntry: code = main(sys.argv[1:])\nexcept SystemExit as end: code = end.code",
        )
    words = [flag.replace("configs/", f"{REPOSITORY}/configs/") for flag in flags]
    output = [] if flags == ["--help"] else ["--output-dir", str(place.output_dir)]
    started = time.monotonic()
    finished = Command(
        [sys.executable, "-c", program, *words, *output], place.nursery.environment, place.root
    ).wait()
    with capsys.disabled():
        print(f"\nsft {' '.join(flags)}: {time.monotonic() - started:.2f} s")
    assert finished.code == 0, finished.output
    assert ("--model.name" in finished.output) or ("the configuration is valid" in finished.output)


def test_two_commands_in_one_folder_at_different_times_are_two_attempts(place: Place) -> None:
    place.train(max_steps=1)
    place.train("sft", "--resume", max_steps=2)
    logs = place.folder().logs
    assert sorted(path.name for path in logs.iterdir()) == ["attempt_1", "attempt_2", "latest"]
    assert (logs / "latest").resolve() == (logs / "attempt_2").resolve()
