"""Where the metrics of a run go: the console and the sinks that the configuration names, on rank 0."""

from __future__ import annotations

from contract.layout import RunFolder
from telemetry.console import Console
from telemetry.metrics import JsonlSink, Metrics, MetricSink
from trainer.config import TrainConfig
from trainer.parallel.process import Process
from trainer.parts import TrackerPart
from trainer.state import TrainState


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
            config=config.model_dump(mode="json", exclude={"server_key"}),
        )
        tracker.ids["wandb"] = sink.run_id
        sinks.append(sink)
    if config.tensorboard is not None:
        from telemetry.trackers import TensorboardSink

        flush_seconds = config.tensorboard.flush_seconds
        sinks.append(
            TensorboardSink(folder.tensorboard, flush_seconds=flush_seconds, first_step=state.step + 1)
        )
    return Metrics(sinks)
