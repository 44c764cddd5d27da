"""`max_epochs` passes: every row once in each, on any number of processes."""

from __future__ import annotations

import pytest

from tests.integration.place import NUM_COUNTABLE, Place, rows_by_step, trained, write_countable_rows


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("packing", [False, True])
def test_every_row_is_seen_exactly_once_in_each_epoch(place: Place, world_size: int, packing: bool) -> None:
    rows = write_countable_rows(place.root / "rows.jsonl")
    options = {"data__path": rows, "data__batch_size": 2, "data__packing": packing, "data__seq_len": 120}
    finished = place.train("sft", max_epochs=3, world_size=world_size, **options)

    records = trained(place.metrics())
    last = records[max(records)]
    assert last["epoch"] == 3
    assert last["total_samples"] == 3 * NUM_COUNTABLE
    total_tokens, rest = divmod(last["total_tokens"], 3)
    assert rest == 0
    seen = rows_by_step(records, total_tokens)
    times = {row: sum(counts.get(row, 0) for counts in seen) for row in range(NUM_COUNTABLE)}
    assert times == dict.fromkeys(range(NUM_COUNTABLE), 3)
    if not packing:
        # 15 rows in updates of 2: the last update is short. An epoch is 5 rows in a row of that sequence.
        assert [sum(counts.values()) for counts in seen] == [2] * 7 + [1]
        first = [row for counts in seen[:2] for row in counts]
        assert len(set(first)) == 4
    assert place.committed() == [len(records)]
    assert f"step {len(records)}/{len(records)}" in finished.output


def test_a_data_set_smaller_than_one_update_trains_on_all_of_it(place: Place) -> None:
    rows = write_countable_rows(place.root / "rows.jsonl")
    place.train("sft", max_epochs=1, world_size=2, data__path=rows, data__batch_size=16)
    assert place.metrics()[1]["total_samples"] == NUM_COUNTABLE
    assert list(trained(place.metrics())) == [1]


def test_resume_in_a_run_of_epochs_ends_where_the_uninterrupted_run_ends(place: Place) -> None:
    place.train("whole", max_epochs=1)
    place.train("parts", max_steps=4)
    place.train("parts", "--resume", max_epochs=1)
    assert trained(place.metrics("parts")) == trained(place.metrics("whole"))
    assert place.metrics("parts")[6]["total_samples"] == 22
