"""What trackers show of the configuration of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from contract.layout import RunFolder
from contract.settings.dump import to_toml
from inference.config import ServerSection
from launcher.rl_config import RLConfig
from orchestrator.config import SourceConfig
from tests.support.wandb_files import read_records
from trainer.config import RLTrainConfig, SFTConfig
from trainer.config.data import FakeDataConfig
from trainer.config.model import ModelConfig
from trainer.config.telemetry import TensorboardConfig, WandbConfig
from trainer.sinks import shown_config

# A process as in a real run: W&B keeps state of its own in the process.
_OPEN = """
import sys
from dataclasses import dataclass
from pathlib import Path
from contract.layout import RunFolder
from contract.settings.load import load_file
from trainer.config import RLTrainConfig
from trainer.parts import TrackerPart
from trainer.sinks import open_metrics
from trainer.state import TrainState

@dataclass
class Process:
    is_main: bool = True

config, root = load_file(RLTrainConfig, Path(sys.argv[1])), Path(sys.argv[2])
open_metrics(config, Process(), RunFolder(root), 1, TrackerPart(), TrainState()).close(failed=False)
"""


def _run(**settings: Any) -> RLConfig:
    source = SourceConfig(environment="sort-letters", settings={"api_key": "secret-c", "level": 3})
    return RLConfig(
        **{
            "max_steps": 3,
            "model": ModelConfig(name="some/model"),
            "sources": [source],
            "inference": ServerSection(api_key="secret-a"),
            "wandb": WandbConfig(offline=True),
            "tensorboard": TensorboardConfig(),
            **settings,
        }
    )


def _leave(folder: RunFolder, config: RLConfig, attempt: int | None) -> None:
    place = folder.config if attempt is None else folder.logs / f"attempt_{attempt}"
    place.mkdir(parents=True)
    (place / "rl.toml").write_text(to_toml(config, header="of the run"))


def test_trackers_of_an_rl_run_show_the_settings_of_all_its_processes_and_no_key(tmp_path: Path) -> None:
    config, folder = _run(), RunFolder(tmp_path / "rl")
    _leave(folder, config, attempt=1)
    path = tmp_path / "trainer.toml"
    path.write_text(to_toml(config.trainer(["http://127.0.0.1:9"])))
    found = subprocess.run(
        [sys.executable, "-c", _OPEN, str(path), str(folder.root)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert found.returncode == 0, found.stderr

    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    (event,) = events.Tensors("config/text_summary")
    on_tensorboard = json.loads(event.tensor_proto.string_val[0])
    (path,) = folder.root.glob("wandb/offline-run-*/run-*.wandb")
    runs = [record.run for record in read_records(path) if record.WhichOneof("record_type") == "run"]
    on_wandb = {item.key: json.loads(item.value_json) for run in runs for item in run.config.update}
    for shown in (on_tensorboard, on_wandb):
        assert shown["sources"][0]["environment"] == "sort-letters"
        assert shown["sources"][0]["settings"] == {"level": 3}
        assert shown["rollout"] == config.rollout.model_dump(mode="json")
        assert shown["inference"]["engine"] == config.inference.engine.model_dump(mode="json")
        assert shown["evaluation"] is None
        # What the trainer was told.
        assert shown["servers"] == ["http://127.0.0.1:9"]
        assert "secret" not in json.dumps(shown) and "server_key" not in shown
    assert event.step == 0


def test_a_trainer_alone_shows_what_the_run_left_and_its_own_settings_win(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    config = _run(max_steps=9).trainer([])
    assert isinstance(config, RLTrainConfig)
    assert "sources" not in shown_config(config, folder, 2)
    _leave(folder, _run(), attempt=None)
    shown = shown_config(config, folder, 2)
    assert (shown["sources"][0]["environment"], shown["max_steps"]) == ("sort-letters", 9)
    # What this attempt was started with is nearer than what the run was resolved to.
    _leave(folder, _run(watchdog_minutes=5.0), attempt=2)
    assert shown_config(config, folder, 2)["watchdog_minutes"] == 5
    # A file that cannot be read takes no run down: trackers are not vital.
    (folder.logs / "attempt_2" / "rl.toml").write_text("[")
    assert "sources" not in shown_config(config, folder, 2)


def test_an_sft_run_shows_its_configuration_as_it_is(tmp_path: Path) -> None:
    config = SFTConfig(model=ModelConfig(name="some/model"), data=FakeDataConfig(), max_steps=3)
    folder = RunFolder(tmp_path)
    _leave(folder, _run(), attempt=1)  # of a run that was here before
    assert shown_config(config, folder, 1) == config.model_dump(mode="json")
