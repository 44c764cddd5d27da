"""Input that cannot work: one message that says what to change, and nothing of an earlier run is lost."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.place import Place, conversation, trained, write_jsonl, write_model
from tests.support.runs import Finished, wait_until

GOOD = [
    conversation("abc", "cba"),
    conversation("de", "ed"),
    conversation("fgh", "hgf"),
    conversation("i", "i"),
]
WITHOUT_ANSWER = {"messages": [{"role": "user", "content": "abc"}]}


def assert_refused(finished: Finished, *parts: str, code: int = 2) -> None:
    """The command ended with `code` and one message that holds `parts`."""
    assert finished.code == code, finished.output
    for part in parts:
        assert part in finished.output
    assert "Traceback" not in finished.output
    assert len(re.findall("(?im)^error: ", finished.output)) == 1, finished.output


def digest(folder: Path) -> dict[str, str]:
    """Content of every file of a run that is worth keeping, by path."""
    kept = [folder / name for name in ("checkpoints", "weights", "metrics.jsonl", "notes.txt")]
    files = [path for item in kept for path in ([item] if item.is_file() else sorted(item.rglob("*")))]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def _write(place: Place, rows: list[Any]) -> Path:
    return write_jsonl(place.root / "rows.jsonl", rows)


def test_a_data_file_that_is_missing_is_named_and_the_run_before_keeps_everything(run_before: Place) -> None:
    before = digest(run_before.folder().root)
    finished = run_before.run("sft", "--resume", max_steps=5, data__path="/nowhere/rows.jsonl")
    assert_refused(finished, "data.path", "/nowhere/rows.jsonl", "does not exist")
    assert digest(run_before.folder().root) == before
    run_before.train("sft", "--resume", max_steps=5)


@pytest.mark.parametrize("wrong", [{"data__path": "/nowhere/rows.jsonl"}, {"model__name": "/nowhere/model"}])
def test_clean_deletes_nothing_if_data_or_model_are_missing(run_before: Place, wrong: dict[str, Any]) -> None:
    before = digest(run_before.folder().root)
    assert_refused(run_before.run("sft", "--clean", max_steps=1, **wrong), "/nowhere/")
    assert digest(run_before.folder().root) == before


def test_a_data_set_without_rows_is_refused(place: Place) -> None:
    finished = place.run(max_steps=1, data__path=_write(place, []))
    assert_refused(finished, "rows.jsonl", "holds no rows", "data.path")


def test_a_row_without_an_answer_is_named_by_its_line(place: Place) -> None:
    finished = place.run(max_steps=1, data__path=_write(place, [GOOD[0], WITHOUT_ANSWER, *GOOD]))
    assert_refused(finished, "rows.jsonl:2", "assistant", "data.on_bad_row")


def test_a_row_without_an_answer_can_be_skipped_and_is_counted(place: Place) -> None:
    rows = _write(place, [GOOD[0], WITHOUT_ANSWER, *GOOD[1:]])
    finished = place.train(max_epochs=1, data__path=rows, data__on_bad_row="skip")
    assert "4 of 5 (1 bad skipped" in finished.output
    assert place.metrics()[1]["total_samples"] == 4


@pytest.mark.parametrize(
    ("fate", "told", "num_samples"),
    [
        ("skip", "4 of 5 (1 longer than 128 tokens skipped)", 4),
        ("truncate", "1 longer than 128 tokens cut", 5),
    ],
)
def test_a_row_longer_than_seq_len_is_counted_and_skipped_or_cut(
    place: Place, fate: str, told: str, num_samples: int
) -> None:
    rows = _write(place, [*GOOD, conversation("a", "b" * 500)])
    finished = place.train(max_epochs=1, data__path=rows, data__on_long_row=fate, data__batch_size=8)
    assert told in finished.output
    assert place.metrics()[1]["total_samples"] == num_samples
    assert place.metrics()[1]["step_tokens"] < 5 * 128


def test_a_row_longer_than_seq_len_stops_the_run_on_request(place: Place) -> None:
    rows = _write(place, [*GOOD, conversation("a", "b" * 500)])
    finished = place.run(max_epochs=1, data__path=rows, data__on_long_row="error")
    assert_refused(finished, "rows.jsonl:5", "longer than data.seq_len = 128", "data.on_long_row")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('max_steps = "many"', ["max_steps", "many", "bad.toml"]),
        ("[optimizer]\nlearn_rate = 1.0", ["optimizer.learn_rate", "bad.toml"]),
        ("[optimizer]\nweight_decy = 1.0", ["optimizer.weight_decy", "weight_decay", "bad.toml"]),
        ("max_step = 3", ["max_step", "max_steps", "bad.toml"]),
        ("model = 3", ["model", "bad.toml"]),
        ("max_steps = 3\nmax_epochs = 1", ["max_steps", "max_epochs", "keep one"]),
        ("max_steps = ", ["bad.toml", "line 1"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_file_before_anything_is_created(
    place: Place, text: str, parts: list[str]
) -> None:
    file = place.root / "bad.toml"
    file.write_text(text + "\n")
    finished = place.nursery.run(["@", str(file), *place.arguments()])
    assert finished.code == 2, finished.output
    for part in parts:
        assert part in finished.output
    assert "Traceback" not in finished.output
    assert not place.output_dir.exists()


@pytest.mark.parametrize("output_dir", ["/proc/tailrace", "{root}/a_file"])
def test_an_output_folder_that_cannot_be_written_is_refused(place: Place, output_dir: str) -> None:
    (place.root / "a_file").write_text("mine")
    finished = place.run(max_steps=1, output_dir=output_dir.format(root=place.root))
    assert_refused(finished, "cannot be written", "output_dir")
    assert (place.root / "a_file").read_text() == "mine"


def test_a_folder_that_holds_a_run_is_refused_and_unchanged(run_before: Place) -> None:
    before = digest(run_before.folder().root)
    finished = run_before.run(max_steps=2)
    assert_refused(finished, "holds a run already", "--resume", "--clean", "--run-name")
    assert digest(run_before.folder().root) == before


def test_clean_starts_anew_and_keeps_files_that_are_not_of_a_run(run_before: Place) -> None:
    finished = run_before.train("sft", "--clean", max_steps=1)
    assert "notes.txt" in finished.output
    assert (run_before.folder().root / "notes.txt").read_text() == "mine"
    assert run_before.committed() == [1]
    assert list(run_before.metrics()) == [1]
    assert not run_before.folder().weights.exists()


@pytest.mark.parametrize("flag", ["--resume", "--clean"])
def test_a_folder_in_which_a_run_is_going_on_is_refused_and_that_run_goes_on(place: Place, flag: str) -> None:
    (rank,) = place.start(max_steps=1_000_000, ckpt__interval=1, ckpt__keep_last=2)
    wait_until(lambda: place.folder().metrics.exists() and 1 in trained(place.metrics()), "a step")
    finished = place.run("sft", flag, max_steps=5)
    assert_refused(finished, "a run is going on in", "--run-name")
    assert rank.is_running()
    rank.send(signal.SIGTERM)
    assert rank.wait().code == 143
    assert list(trained(place.metrics())) == list(range(1, place.committed()[-1] + 1))


def test_a_model_folder_that_is_missing_is_named(place: Place) -> None:
    finished = place.run(max_steps=1, model__name="/nowhere/model")
    assert_refused(finished, "model.name", "/nowhere/model")


def test_weights_that_are_cut_off_are_refused(place: Place) -> None:
    shutil.copytree(place.shared / "model", place.root / "model")
    weights = place.root / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    finished = place.run(max_steps=1, model__name=place.root / "model")
    assert_refused(finished, "model.safetensors")


def test_a_model_without_weights_is_refused(place: Place) -> None:
    shutil.copytree(place.shared / "model", place.root / "model")
    (place.root / "model" / "model.safetensors").unlink()
    finished = place.run(max_steps=1, model__name=place.root / "model")
    assert_refused(finished, "model")


def test_nothing_to_resume_is_said(place: Place) -> None:
    finished = place.run("sft", "--resume", max_steps=1)
    assert_refused(finished, "holds no checkpoint", "remove `--resume`", code=1)
    assert not place.folder().holds_run()


def test_a_step_that_is_not_there_is_named_with_those_that_are(run_before: Place) -> None:
    before = digest(run_before.folder().root)
    finished = run_before.run(max_steps=5, resume__step=7)
    assert_refused(finished, "no step 7", "available: 2, 4", code=1)
    assert digest(run_before.folder().root) == before


def test_a_damaged_newest_step_is_passed_over_with_a_warning_but_never_loaded_by_name(
    run_before: Place,
) -> None:
    shard = next((run_before.checkpoint("sft", 4) / "trainer").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    finished = run_before.run(max_steps=5, resume__step=4)
    assert_refused(finished, "step 4 cannot be loaded", shard.name, "available: 2", code=1)
    finished = run_before.train("sft", "--resume", max_steps=5)
    assert "step_4 is not used" in finished.output
    assert list(trained(run_before.metrics())) == [1, 2, 3, 4, 5]


def test_a_step_whose_bytes_have_changed_is_not_loaded(run_before: Place) -> None:
    shard = next((run_before.checkpoint("sft", 4) / "trainer").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    before = digest(run_before.folder().root)
    finished = run_before.run("sft", "--resume", max_steps=5)
    assert_refused(finished, "step_4", shard.name, "damaged", code=1)
    assert digest(run_before.folder().root) == before


def test_a_checkpoint_of_another_model_is_refused(run_before: Place) -> None:
    other = write_model(run_before.root / "other", dropout=0.0)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    before = digest(run_before.folder().root)
    finished = run_before.run("sft", "--resume", max_steps=5, model__name=other)
    assert_refused(finished, "another model", "model.name", code=1)
    assert digest(run_before.folder().root) == before


def test_a_checkpoint_of_other_data_is_refused_unless_the_position_is_skipped(run_before: Place) -> None:
    rows = _write(run_before, GOOD)
    before = digest(run_before.folder().root)
    finished = run_before.run("sft", "--resume", max_steps=5, data__path=rows)
    assert_refused(finished, "the data is not that of the checkpoint", "resume.skip_data", code=1)
    assert digest(run_before.folder().root) == before
    run_before.train("sft", "--resume.skip-data", max_steps=5, data__path=rows)


def test_a_checkpoint_of_another_optimizer_is_refused_unless_it_is_skipped(run_before: Place) -> None:
    before = digest(run_before.folder().root)
    finished = run_before.run("sft", "--resume", max_steps=5, optimizer__type="muon")
    assert_refused(finished, "optimizer", "resume.skip_optimizer", code=1)
    assert digest(run_before.folder().root) == before
    run_before.train("sft", "--resume.skip-optimizer", max_steps=5, optimizer__type="muon")
