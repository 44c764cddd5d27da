"""Where the metrics of a run go: the console and the sinks that the configuration names, on rank 0; and what
trackers show of the configuration.
"""

from __future__ import annotations

import logging
from typing import Any

from contract.layout import RunFolder
from contract.settings.dump import read_values
from telemetry.console import Console
from telemetry.metrics import JsonlSink, Metrics, MetricSink
from trainer.config import RLTrainConfig, TrainConfig
from trainer.parallel.process import Process
from trainer.parts import TrackerPart
from trainer.state import TrainState

logger = logging.getLogger(__name__)

_KEYS = ("api_key", "server_key")
"""Settings that no tracker gets to see, in whatever section or settings of an environment."""


def open_console(config: TrainConfig, process: Process) -> Console:
    """The terminal; silent on the other ranks."""
    if not process.is_main:
        return Console.silent()
    return Console(config.run_name, live=config.log.live, interval=config.log.interval)


def open_metrics(
    config: TrainConfig,
    process: Process,
    folder: RunFolder,
    attempt: int,
    tracker: TrackerPart,
    state: TrainState,
) -> Metrics:
    """The sinks; none on the other ranks. Notes the ids of outside trackers in `tracker`."""
    if not process.is_main:
        return Metrics([])
    jsonl = JsonlSink(folder.metrics, attempt=attempt)
    sinks: list[MetricSink] = [jsonl]
    shown = shown_config(config, folder, attempt)
    if config.wandb is not None:
        from telemetry.trackers import WandbSink

        sink = WandbSink(
            folder.root,
            project=config.wandb.project,
            run_id=tracker.ids.get("wandb"),
            num_earlier_records=jsonl.num_records,
            entity=config.wandb.entity,
            run_name=config.wandb.name or config.run_name,
            group=config.wandb.group,
            tags=config.wandb.tags,
            offline=config.wandb.offline,
            config=shown,
        )
        tracker.ids["wandb"] = sink.run_id
        sinks.append(sink)
    if config.tensorboard is not None:
        from telemetry.trackers import TensorboardSink

        flush_seconds = config.tensorboard.flush_seconds
        first_step = state.step + 1
        sinks.append(
            TensorboardSink(
                folder.tensorboard, flush_seconds=flush_seconds, first_step=first_step, config=shown
            )
        )
    return Metrics(sinks)


def shown_config(config: TrainConfig, folder: RunFolder, attempt: int) -> dict[str, Any]:
    """The resolved configuration for a tracker, without keys: of an RL run that of all its processes, if `rl`
    left it in the folder of this attempt or of the run. What the trainer itself was told wins.
    """
    whole = _of_all_processes(folder, attempt) if isinstance(config, RLTrainConfig) else {}
    return _without_keys({**whole, **config.model_dump(mode="json")})


def _of_all_processes(folder: RunFolder, attempt: int) -> dict[str, Any]:
    for path in (folder.logs / f"attempt_{attempt}" / "rl.toml", folder.config / "rl.toml"):
        try:
            return read_values(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            logger.warning("trackers show the trainer's settings only: %s cannot be read (%s)", path, error)
            return {}
    return {}


def _without_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_keys(item) for name, item in value.items() if name not in _KEYS}
    if isinstance(value, list):
        return [_without_keys(item) for item in value]
    return value
