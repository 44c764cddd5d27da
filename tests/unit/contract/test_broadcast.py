from __future__ import annotations

import pytest
import torch

from contract.broadcast import can_use_nccl, cut, name_device, no_check, own_address, view, wait_until
from contract.policy import TensorInfo


def test_buckets_keep_the_order_and_the_limit_and_a_large_tensor_is_alone() -> None:
    sizes = [3, 4, 20, 1, 1, 6, 2]
    tensors = [TensorInfo(str(index), "uint8", [size]) for index, size in enumerate(sizes)]
    buckets = cut(tensors, 8)
    assert [[slot.tensor.name for slot in bucket.slots] for bucket in buckets] == [
        ["0", "1"], ["2"], ["3", "4", "5"], ["6"],
    ]  # fmt: skip
    assert [bucket.num_bytes for bucket in buckets] == [7, 20, 8, 2]
    for bucket in buckets:
        assert [slot.start for slot in bucket.slots] == [0, *(slot.stop for slot in bucket.slots[:-1])]


def test_a_view_is_the_tensor_at_its_place() -> None:
    (bucket,) = cut(
        [TensorInfo("a", "float32", [2, 2]), TensorInfo("b", "bfloat16", []), TensorInfo("c", "bool", [0])],
        99,
    )
    flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    a, b, c = (view(flat, slot) for slot in bucket.slots)
    a.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    b.fill_(5.0)
    assert torch.equal(flat[:16].view(torch.float32), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert flat[16:].view(torch.bfloat16).item() == 5.0 and (b.shape, c.shape) == ((), (0,))


def test_the_own_address_towards_loopback_is_loopback() -> None:
    assert own_address("localhost", 1) in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["0a", "0b", "0c"], True),
        (["0a", "0b", "0a"], False),
        (["0a", name_device(torch.device("cpu"))], False),
        (["a MIG slice of GPU 0a", "a MIG slice of GPU 0b"], False),
    ],
    ids=["GPUs", "one GPU twice", "a CPU", "slices"],
)
def test_nccl_joins_whole_gpus_each_once(devices: list[str], expected: bool) -> None:
    assert can_use_nccl(devices) is expected


def test_a_wait_ends_with_what_it_waits_for_or_its_limit_or_when_there_is_nothing_to_wait_for() -> None:
    looks = iter([False, False, True])
    wait_until(lambda: next(looks), 60, no_check)
    with pytest.raises(RuntimeError, match="timed out"):
        wait_until(lambda: False, 0.05, no_check)

    def check() -> None:
        raise LookupError("the peer has left")

    with pytest.raises(LookupError, match="the peer has left"):
        wait_until(lambda: False, 60, check)
