"""What `resume` loads, what each `skip` flag leaves out, and what a run that is complete does."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.integration.place import Place, tensors_of

SCHEDULE = {"schedule__type": "linear", "schedule__warmup_steps": 2, "schedule__decay_steps": 2}


def _optimizer_steps(path: Path) -> set[int]:
    return {
        int(tensor.item())
        for name, tensor in tensors_of(path).items()
        if name.startswith("optimizer.") and name.endswith("step")
    }


@pytest.mark.parametrize(
    ("flags", "step", "optimizer_steps", "schedule_steps", "rows"),
    [
        ((), 5, 5, 5, 20),
        (("--resume.skip-optimizer",), 5, 1, 5, 20),
        (("--resume.skip-scheduler",), 5, 5, 1, 20),
        (("--resume.skip-progress",), 1, 5, 5, 20),
        (("--resume.skip-data",), 5, 5, 5, 4),
        (
            (
                "--resume.skip-optimizer",
                "--resume.skip-scheduler",
                "--resume.skip-progress",
                "--resume.skip-data",
            ),
            1,
            1,
            1,
            4,
        ),
    ],
)
def test_a_skip_flag_leaves_out_its_part_and_nothing_else(
    run_before: Place, flags: tuple[str, ...], step: int, optimizer_steps: int, schedule_steps: int, rows: int
) -> None:
    # Without a learning rate the weights after one update are those that were loaded.
    finished = run_before.train(
        "next", *flags, max_steps=step, resume__dir=run_before.checkpoint("sft", 4), optimizer__lr=0.0
    )
    before, after = run_before.checkpoint("sft", 4), run_before.checkpoint("next", step)
    parts = run_before.state("next", step)["parts"]
    assert parts["progress"]["step"] == step
    assert parts["progress"]["num_samples"] == 4 * step
    assert parts["schedule"]["schedule_step"] == schedule_steps
    assert parts["data"]["num_rows_taken"] == rows
    assert _optimizer_steps(after) == {optimizer_steps}
    old, new = tensors_of(before), tensors_of(after)
    weights = [name for name in old if name.startswith("model.")]
    assert weights
    assert all(old[name].equal(new[name]) for name in weights)
    assert f"resumes step 4 of {before}" in finished.output


def test_weights_alone_loaded_into_full_offload_stay_exactly_as_they_are_without_a_learning_rate(
    run_before: Place,
) -> None:
    source = run_before.checkpoint("sft", 4)
    run_before.train(
        "next",
        "--resume.skip-optimizer",
        max_steps=6,
        resume__dir=source,
        optimizer__lr=0.0,
        model__offload="full",
        ckpt__async_save=True,
        ckpt__interval=1,
    )
    assert run_before.committed("next") == [5, 6]
    assert _optimizer_steps(run_before.checkpoint("next", 6)) == {2}
    old, new = tensors_of(source), tensors_of(run_before.checkpoint("next", 6))
    weights = [name for name in old if name.startswith("model.")]
    assert weights
    assert [name for name in weights if not old[name].equal(new[name])] == []


def test_a_schedule_that_starts_afresh_spans_the_updates_that_are_left(run_before: Place) -> None:
    options = {"max_steps": 10, "resume__dir": run_before.checkpoint("sft", 4), **SCHEDULE}
    run_before.train("afresh", "--resume.skip-scheduler", **options)
    run_before.train("carried_on", **options)
    rates = [record["lr"] for record in run_before.metrics("afresh").values() if "lr" in record]
    carried_on = [record["lr"] for record in run_before.metrics("carried_on").values() if "lr" in record]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.005, 0.0], abs=1e-9)
    assert carried_on == pytest.approx([0.01, 0.01, 0.01, 0.01, 0.005, 0.0], abs=1e-9)


def test_resume_of_a_complete_run_trains_nothing_and_touches_no_checkpoint(run_before: Place) -> None:
    def content() -> dict[str, tuple[int, str]]:
        files = sorted(run_before.folder().checkpoints.rglob("*"))
        return {
            str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in files
            if path.is_file()
        }

    before = content()
    finished = run_before.train("sft", "--resume", max_steps=4)
    assert "nothing was trained" in finished.output
    assert content() == before
    fewer = run_before.train("sft", "--resume", max_steps=3)
    assert "nothing was trained" in fewer.output
    assert content() == before


def test_going_on_from_an_earlier_step_moves_the_later_ones_out_of_the_way(run_before: Place) -> None:
    run_before.train(max_steps=3, resume__step=2, optimizer__lr=0.02)
    assert run_before.committed() == [2, 3]
    superseded = run_before.folder().checkpoints / "superseded" / "step_4"
    assert (superseded / "complete.json").exists()
    run_before.train("sft", "--resume", max_steps=4)
    assert run_before.committed() == [2, 3, 4]
