"""What the configuration makes of a run: where it stands, and how long an episode may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from contract.errors import CheckpointError, RunFolderError
from contract.layout import RunFolder
from contract.sections import ModelFilesConfig
from contract.store import StoreFolder
from orchestrator.build import build_progress, longest_episode, read_run_id
from orchestrator.config import OrchestratorConfig, RolloutConfig, SourceConfig
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


def test_a_run_is_known_by_its_id(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match="`rl` makes it"):
        read_run_id(folder)
    folder.run_id.write_text("12ab\n")
    assert read_run_id(folder) == "12ab"


@dataclass(frozen=True)
class _Source:
    config: SourceConfig
    max_turns: int


def test_an_episode_may_take_what_its_limits_allow_while_others_are_before_it() -> None:
    rollout = RolloutConfig(max_concurrent=10, request_timeout_seconds=100, server_patience_seconds=7)
    source = _Source(SourceConfig(environment="x:one", num_workers=4, timeout_seconds=5), max_turns=2)
    # Task, start, two turns and the reward, each behind the calls of two others at that worker.
    assert longest_episode(rollout, [source]) == 5 * 3 * 5 + 2 * 100 + 7  # pyright: ignore
