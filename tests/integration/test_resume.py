"""A run that was ended and went on equals one that was not."""

from __future__ import annotations

import pytest

from tests.integration.place import (
    Place,
    assert_same_tensors,
    rows_by_step,
    tensors_of,
    trained,
    write_countable_rows,
)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_chain_of_three_processes_equals_one_uninterrupted_run_bit_for_bit(
    place: Place, world_size: int
) -> None:
    place.train("whole", max_steps=9, ckpt__interval=3, world_size=world_size)
    place.train("chain", max_steps=3, ckpt__interval=3, world_size=world_size)
    # 22 rows in batches of 4: the second process passes the end of the epoch inside an update.
    place.train("chain", "--resume", max_steps=6, ckpt__interval=3, world_size=world_size)
    place.train("chain", "--resume", max_steps=9, ckpt__interval=3, world_size=world_size)

    assert place.committed("chain") == [3, 6, 9]
    for step in (3, 6, 9):
        assert_same_tensors(place.checkpoint("whole", step), place.checkpoint("chain", step))
        assert place.state("whole", step) == place.state("chain", step)
    assert list(trained(place.metrics("whole"))) == list(range(1, 10))
    assert trained(place.metrics("chain")) == trained(place.metrics("whole"))


def test_the_dropout_of_these_models_draws_random_numbers_in_every_step(place: Place) -> None:
    place.train("with", max_steps=2, ckpt__interval=1)
    place.train("without", max_steps=2, ckpt__interval=1, model__name=place.shared / "still")
    first, second = (tensors_of(place.checkpoint("with", step))["rng.rank_0"].tolist() for step in (1, 2))
    unused = [tensors_of(place.checkpoint("without", step))["rng.rank_0"].tolist() for step in (1, 2)]
    assert first != second
    assert unused[0] == unused[1]
    assert place.metrics("with")[1]["loss"] != place.metrics("without")[1]["loss"]


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_going_on_from_the_middle_keeps_schedule_packing_and_momentum(place: Place, optimizer: str) -> None:
    options = {
        "max_steps": 6,
        "ckpt__interval": 3,
        "optimizer__type": optimizer,
        "optimizer__momentum": 0.9,
        "schedule__type": "cosine",
        "schedule__warmup_steps": 2,
        "data__packing": True,
        "data__batch_size": 2,
    }
    place.train("whole", **options)
    place.train("rest", resume__dir=place.checkpoint("whole", 3), **options)

    whole = trained(place.metrics("whole"))
    assert len({record["lr"] for record in whole.values()}) > 4
    assert trained(place.metrics("rest")) == {step: whole[step] for step in (4, 5, 6)}
    assert_same_tensors(place.checkpoint("whole", 6), place.checkpoint("rest", 6))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_at_another_world_size_the_same_rows_come_in_the_same_order(
    place: Place, before: int, after: int
) -> None:
    rows = write_countable_rows(place.root / "rows.jsonl")
    options = {"data__path": rows, "data__batch_size": 2, "model__name": place.shared / "still"}
    place.train("whole", max_steps=9, **options)
    place.train("split", max_steps=4, world_size=before, **options)
    finished = place.train("split", "--resume", max_steps=9, world_size=after, **options)

    whole, split = trained(place.metrics("whole")), trained(place.metrics("split"))
    total_tokens = sum(whole[step]["step_tokens"] for step in (1, 2, 3, 4, 5)) // 2  # two epochs of 5 rows
    seen = rows_by_step(split, total_tokens)
    assert seen == rows_by_step(whole, total_tokens)
    epoch = [row for counts in seen[:5] for row, count in counts.items() for _ in range(count)]
    assert sorted(epoch) == sorted([*range(5), *range(5)])
    for key in ("step_tokens", "tokens/ce", "total_samples", "epoch", "lr"):
        assert [record[key] for record in split.values()] == [record[key] for record in whole.values()]
    for step in whole:
        assert split[step]["loss"] == pytest.approx(whole[step]["loss"], abs=1e-5)
    assert "random generators cannot be carried over" in finished.output


def test_the_command_on_two_processes_goes_on_bit_for_bit_in_a_fresh_interpreter(place: Place) -> None:
    place.train("whole", max_steps=4, ckpt__interval=2, world_size=2)
    place.train("parts", max_steps=2, world_size=2)
    command = place.command("parts", "--resume", max_steps=4, deployment__num_processes=2)
    finished = command.wait()
    assert finished.code == 0, finished.output

    assert_same_tensors(place.checkpoint("whole", 4), place.checkpoint("parts", 4))
    assert trained(place.metrics("parts")) == trained(place.metrics("whole"))
