from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from contract.settings.load import load_file
from launcher.rl_config import RLConfig
from orchestrator.config import RolloutSections
from orchestrator.environment.load import BUILT_IN, load_environment

from .sources import SourceConfig, running

_PAGE = (Path(__file__).parents[4] / "docs" / "environments.md").read_text()
_BLOCKS = re.findall(r"```(\w+)\n(.*?)```", _PAGE, re.DOTALL)
_PYTHON = [text for language, text in _BLOCKS if language == "python"]
_TEMPLATE, _CHECK = _PYTHON


def test_the_template_has_at_most_20_lines() -> None:
    assert 0 < sum(bool(line.strip()) for line in _TEMPLATE.splitlines()) <= 20


def test_the_template_runs_in_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text(_TEMPLATE)
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        config = SourceConfig(environment="my_tasks:Capitals", settings={"upper": True})
        async with running(config) as source:
            assert (source.num_tasks, source.max_turns) == (4, 1)
            task = await source.task(1)
            messages = await source.start(task)
            assert messages == [{"role": "user", "content": "Capital of Japan? One word."}]
            for answer, reward in [("TOKYO", 1.0), ("Tokyo", 0.0)]:
                episode = [*messages, {"role": "assistant", "content": answer}]
                assert await source.reward(task, episode, {}) == {"reward": reward}

    asyncio.run(run())


def test_the_test_of_the_page_passes_and_can_fail(tmp_path: Path) -> None:
    (tmp_path / "my_tasks.py").write_text(_TEMPLATE)
    for reward, code in [("[1.0, 0.0]", 0), ("[0.0, 1.0]", 1)]:
        text = _CHECK.replace("[1.0, 0.0]", reward) + "\n\ntest_capitals()\n"
        done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, timeout=60, check=False)
        assert done.returncode == code


def test_the_configurations_of_the_page_are_valid(tmp_path: Path) -> None:
    text, whole = [text for language, text in _BLOCKS if language == "toml"]
    (tmp_path / "capitals.toml").write_text(whole)
    config = load_file(RLConfig, tmp_path / "capitals.toml")
    assert [source.environment for source in config.sources] == ["my_tasks:Capitals"]
    sections = RolloutSections.model_validate(tomllib.loads(text))
    assert [source.title for source in sections.sources] == ["arithmetic", "Capitals"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_page_tells_every_setting_and_its_default(name: str) -> None:
    section = re.split(r"\*\*`", _PAGE.partition("## Built in")[2])
    [own] = [text for text in section if text.startswith(f"{name}`**")]
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", section[0] + own, re.MULTILINE)
    told: dict[str, Any] = {}
    for keys, defaults in rows:
        values = re.findall(r"`(.*?)`", defaults) or ["None"]
        told |= zip(re.findall(r"`(\w+)`", keys), values, strict=True)
    parameters = inspect.signature(type(load_environment("x", name, {}))).parameters.values()
    letters = "abcdefghijklmnopqrstuvwxyz"
    expected = {p.name: str(p.default).replace(letters, "a...z") for p in parameters}
    assert {key: value.strip('"') for key, value in told.items()} == expected
