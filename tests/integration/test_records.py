"""What a run leaves for people and trackers: metrics, Weights & Biases offline, TensorBoard, traces."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

from tests.integration.place import Place, trained
from tests.support.runs import wait_until


def _records(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_metrics_of_a_run_that_crashed_and_went_on_have_each_step_once_as_its_last_attempt_saw_it(
    place: Place,
) -> None:
    (rank,) = place.start(max_steps=100_000, ckpt__interval=3)
    path = place.folder().metrics
    wait_until(lambda: path.exists() and path.read_text().count('"loss"') >= 8, "the eighth step")
    rank.send(signal.SIGKILL)
    rank.wait()
    last = place.committed()[-1]
    with open(path, "a") as file:
        file.write('{"step": 12, "att')  # as a kill in the middle of a record leaves it
    place.train("sft", "--resume", max_steps=last + 4)

    records = _records(path)
    assert {record["attempt"] for record in records} == {1, 2}
    again = [record["step"] for record in records if record["attempt"] == 2 and "loss" in record]
    assert again == [last + 1, last + 2, last + 3, last + 4]
    assert list(trained(place.metrics())) == list(range(1, last + 5))


def test_a_loss_that_is_not_finite_is_null_in_the_metrics_and_no_such_weight_is_committed(
    place: Place,
) -> None:
    finished = place.run(
        max_steps=40,
        optimizer__lr=1e30,
        optimizer__max_grad_norm="None",
        optimizer__on_non_finite="stop",
        ckpt__interval=1,
    )
    assert finished.code == 1, finished.output
    assert "Traceback" not in finished.output
    _records(place.folder().metrics)
    import torch

    from tests.integration.place import tensors_of

    for step in place.committed():
        weights = tensors_of(place.checkpoint("sft", step))
        assert all(
            bool(torch.isfinite(item).all()) for name, item in weights.items() if name.startswith("model.")
        )


def test_skipped_updates_are_counted_and_change_nothing(place: Place) -> None:
    place.train(max_steps=4, optimizer__lr=1e30, optimizer__max_grad_norm="None", ckpt=None)
    records = place.metrics()
    skipped = [step for step, record in records.items() if record["skipped_updates"]]
    assert skipped
    first = records[skipped[0]]
    assert first["loss"] is None or first["grad_norm"] is None
    for key in ("loss", "grad_norm"):
        if first[key] is None:
            assert first[f"{key}/non_finite"] in ("nan", "inf")
    assert all(record["loss"] is None or math.isfinite(record["loss"]) for record in records.values())


def test_trackers_and_traces_are_written_offline_and_a_resumed_run_keeps_its_id(place: Place) -> None:
    options = {
        "wandb__offline": True,
        "tensorboard__flush_seconds": 1,
        "profiler__start_step": 1,
        "profiler__num_steps": 1,
    }
    place.train(max_steps=2, **options)
    place.train("sft", "--resume", max_steps=4, **options)

    root = place.folder().root
    wandb_runs = [path.name for path in (root / "wandb").iterdir() if path.name.startswith("offline-run-")]
    ids = {name.rpartition("-")[2] for name in wandb_runs}
    assert len(wandb_runs) == 2
    assert len(ids) == 1
    assert place.state("sft", 4)["parts"]["tracker"] == {"wandb": ids.pop()}

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place.folder().tensorboard))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert sorted(losses) == [1, 2, 3, 4]
    for step, record in place.metrics().items():
        assert math.isclose(losses[step], record["loss"], rel_tol=1e-6)

    traces = sorted(path.name for path in place.folder().traces.iterdir())
    assert traces == ["step_1_rank_0.json", "step_3_rank_0.json"]
    for name in traces:
        assert json.loads((place.folder().traces / name).read_text())["traceEvents"]


def test_a_run_from_another_runs_checkpoint_gets_a_tracker_id_of_its_own(place: Place) -> None:
    place.train("first", max_steps=1, wandb__offline=True)
    place.train("second", max_steps=2, wandb__offline=True, resume__dir=place.checkpoint("first", 1))
    first, second = (
        place.state(name, step)["parts"]["tracker"] for name, step in (("first", 1), ("second", 2))
    )
    assert first["wandb"] != second["wandb"]


def test_the_resolved_configuration_of_a_run_can_be_run_again(place: Place) -> None:
    place.train("first", max_steps=2)
    config = place.folder("first").config / "sft.toml"
    finished = place.nursery.run(["@", str(config), "--run-name", "second"])
    assert finished.code == 0, finished.output
    assert trained(place.metrics("second")) == trained(place.metrics("first"))
