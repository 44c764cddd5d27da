"""Buckets of several ranks, byte for byte."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.engine import rank_process
from tests.support.ranks import run_ranks
from trainer.parallel.layout import LogicalTensor, Piece
from trainer.publish.gather import collect, make_plan, pack

WHOLE = {
    "rows": torch.arange(15.0).reshape(5, 3),
    "columns": torch.arange(8.0).reshape(2, 4) - 3,
    "counts": torch.tensor([1, -2, 3], dtype=torch.int8),
}


def share_of(rank: int) -> dict[str, LogicalTensor]:
    """Of `rows` the first rank has the ends and the second the middle; of `columns` each has half; `counts`
    are replicated, and three bytes long.
    """
    rows, columns = WHOLE["rows"], WHOLE["columns"]
    ends = (Piece((0, 0), rows[:1]), Piece((3, 0), rows[3:]))
    middle = (Piece((1, 0), rows[1:3]),)
    return {
        "rows": LogicalTensor((5, 3), torch.float32, middle if rank else ends),
        "columns": LogicalTensor(
            (2, 4), torch.float32, (Piece((0, 2 * rank), columns[:, 2 * rank :][:, :2]),)
        ),
        "counts": LogicalTensor.replicated(WHOLE["counts"]),
    }


def gather_all(bucket_bytes: int) -> list[tuple[str, torch.Tensor]] | None:
    process = rank_process()
    weights = share_of(process.rank)
    plan = make_plan(weights, torch.float32, bucket_bytes, process)
    found: list[tuple[str, torch.Tensor]] = []
    for bucket in plan.buckets:
        whole = collect(plan, bucket, pack(plan, bucket, weights, process), process)
        assert (whole is not None) == process.is_main
        if whole is not None:
            assert len(whole) == bucket.num_bytes
            for slot in bucket.slots:
                content = whole[slot.start : slot.stop].clone()
                dtype = WHOLE[slot.tensor.name].dtype
                found.append((slot.tensor.name, content.view(dtype).reshape(slot.tensor.shape)))
    return found


def test_tensors_of_several_types_and_cuts_are_put_together(tmp_path: Path) -> None:
    for bucket_bytes in (1000, 40):
        found, nothing = run_ranks(gather_all, 2, bucket_bytes)
        assert nothing == [] and {name for name, _ in found} == WHOLE.keys() and len(found) == 3
        for name, tensor in found:
            assert torch.equal(tensor, WHOLE[name]), (bucket_bytes, name)
