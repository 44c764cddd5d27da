"""What the configuration makes of a run: where it stands, and how long an episode may take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contract.errors import CheckpointError, DataError
from contract.sections import ModelFilesConfig
from contract.store import StoreFolder
from inference.config import InferenceConfig
from orchestrator.build import build_progress, longest_episode
from orchestrator.config import OrchestratorConfig, RolloutConfig, SourceConfig
from orchestrator.dispatch import places_for
from tests.support.rollouts import FakeSource

SOURCES = [FakeSource("one", 7), FakeSource("two", 4)]


def _config(resume_dir: str | None) -> OrchestratorConfig:
    return OrchestratorConfig(
        sources=[SourceConfig(environment="x:one", weight=2), SourceConfig(environment="x:two")],
        output_dir=Path("out"),
        run_name="run",
        max_steps=3,
        seq_len=64,
        model=ModelFilesConfig(name="m"),
        servers=["http://127.0.0.1:9"],
        resume_dir=resume_dir,
    )


def test_a_new_run_begins_with_the_first_position() -> None:
    progress, snapshot = build_progress(_config(None), SOURCES)
    assert snapshot is None and progress.take().position == 0


@pytest.mark.parametrize("in_store", [False, True])
def test_a_run_goes_on_from_a_checkpoint_wherever_it_lies(in_store: bool, tmp_path: Path) -> None:
    progress, _ = build_progress(_config(None), SOURCES)
    draws = [progress.take() for _ in range(5)]
    for draw in (draws[0], draws[3]):
        progress.finish(draw)
    content = progress.snapshot(2, {})
    if in_store:
        checkpoint = StoreFolder(f"memory://{tmp_path.name}/step_2")
        checkpoint.filesystem.pipe(f"{checkpoint}/orchestrator/state.json", content)
    else:
        checkpoint = tmp_path / "step_2"
        (checkpoint / "orchestrator").mkdir(parents=True)
        (checkpoint / "orchestrator/state.json").write_bytes(content)
    resumed, snapshot = build_progress(_config(str(checkpoint)), SOURCES)
    assert snapshot is not None and snapshot.step == 2
    again = [resumed.take() for _ in range(6)]
    assert again[:3] == [draws[1], draws[2], draws[4]]
    assert again[3:] == [progress.take() for _ in range(3)]


def test_a_checkpoint_from_before_the_first_batch_begins_with_the_first_position(tmp_path: Path) -> None:
    (tmp_path / "orchestrator").mkdir()
    (tmp_path / "orchestrator/state.json").write_text("null")  # what the trainer has before a batch
    progress, snapshot = build_progress(_config(str(tmp_path)), SOURCES)
    assert snapshot is None and progress.take().position == 0


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"resume\.skip_progress and resume\.skip_data"):
        build_progress(_config(str(tmp_path)), SOURCES)


@dataclass(frozen=True)
class _Source:
    config: SourceConfig
    max_turns: int


def test_an_episode_may_take_what_its_limits_allow_while_others_are_before_it() -> None:
    rollout = RolloutConfig(max_concurrent=10, request_timeout_seconds=100, server_patience_seconds=7)
    source = _Source(SourceConfig(environment="x:one", num_workers=4, timeout_seconds=5), max_turns=2)
    # Task, start, two turns and the reward, each behind the calls of two others at that worker.
    assert longest_episode(rollout, [source]) == 5 * 3 * 5 + 2 * 100 + 7  # pyright: ignore
    # Or less, by the limit of the whole; the task is asked for before that begins.
    rollout = rollout.model_copy(update={"episode_timeout_seconds": 40})
    assert longest_episode(rollout, [source]) == 3 * 5 + 40 + 7  # pyright: ignore


def test_by_default_a_turn_may_wait_for_all_other_episodes_to_be_drawn_before_it() -> None:
    rollout = RolloutConfig()
    rounds = math.ceil(places_for(rollout) / InferenceConfig.model_fields["engine"].get_default().max_batch)
    assert rounds > 1 and rollout.request_timeout_seconds >= rounds * 600


@pytest.mark.parametrize(("max_lead", "max_age", "lead"), [(0, 4, 0), (1, 0, 0), (3, 2, 2), (1, 4, 1)])
def test_the_lead_is_bounded_by_the_age_of_tokens(max_lead: int, max_age: int, lead: int) -> None:
    rollout = RolloutConfig(max_lead=max_lead, max_off_policy_steps=max_age)
    assert rollout.lead == lead
    assert places_for(rollout) == (lead + 1) * rollout.batch_size


@pytest.mark.parametrize("changed", [{"environment": "y:one"}, {"settings": {"level": 2}}])
def test_another_environment_with_as_many_tasks_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    progress, _ = build_progress(_config(None), SOURCES)
    (tmp_path / "orchestrator").mkdir()
    (tmp_path / "orchestrator/state.json").write_bytes(progress.snapshot(2, {}))
    config = _config(str(tmp_path))
    build_progress(config, SOURCES)
    other = config.sources[0].model_copy(update=changed)
    with pytest.raises(DataError, match=r"sources was .*number of tasks, environment and settings"):
        build_progress(config.model_copy(update={"sources": [other, config.sources[1]]}), SOURCES)
