"""New weights for the running model: read and checked beside it, then copied into place.

Nothing of the model changes until everything has come and was found right.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from contract.errors import PublishError
from inference.engine.base import NamedTensors

_NUM_SHOWN = 3


class Staged:
    """A whole set of weights in host memory (pinned, for a model on a GPU), of the model's names, shapes and
    types.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @torch.no_grad()
    def copy_into(self, lm: Any) -> None:
        """Replace the weights of `lm`, in place."""
        state = lm.state_dict(keep_vars=True)
        for name, tensor in self._tensors.items():
            # Whatever is computed next on the GPU comes after it.
            state[name].copy_(tensor, non_blocking=True)


@torch.no_grad()
def stage(lm: Any, tensors: NamedTensors) -> Staged:
    """Read all of `tensors` and check them against `lm`. Of names that share one weight (a head tied to the
    embeddings) any may come; those that do must be equal.

    Raises:
        PublishError: `tensors` fails while it is read, or a name is unknown, comes twice or is missing, or a
            shape or a kind of number is another.
    """
    targets: dict[str, torch.Tensor] = lm.state_dict(keep_vars=True)
    device = next(iter(targets.values())).device
    # Beside the stream in which tokens are drawn: in that one, drawing and copying would wait for each other.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    staged: dict[str, torch.Tensor] = {}
    try:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for name, tensor in tensors:
                _check(name, tensor, targets, staged)
                # Always a copy: whoever sends may use its buffer again, or have it mapped from a file.
                staged[name] = torch.empty(
                    tensor.shape, dtype=targets[name].dtype, device="cpu", pin_memory=stream is not None
                )
                staged[name].copy_(tensor, non_blocking=True)
        if stream is not None:
            stream.synchronize()
    except PublishError:
        raise
    except Exception as error:
        raise PublishError(f"the new weights cannot be read: {type(error).__name__}: {error}") from error
    return Staged(_without_aliases(targets, staged))


def _check(
    name: str, tensor: torch.Tensor, targets: dict[str, torch.Tensor], staged: dict[str, torch.Tensor]
) -> None:
    target = targets.get(name)
    if target is None:
        raise PublishError(f"the new weights hold {name!r}, which is no weight of the served model")
    if name in staged:
        raise PublishError(f"the new weights hold {name!r} twice")
    if tensor.shape != target.shape:
        raise PublishError(
            f"{name!r} has shape {list(tensor.shape)} in the new weights and {list(target.shape)} in the "
            f"served model"
        )
    if tensor.is_floating_point() != target.is_floating_point():
        raise PublishError(
            f"{name!r} is {tensor.dtype} in the new weights and {target.dtype} in the served model"
        )


def _without_aliases(
    targets: dict[str, torch.Tensor], staged: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    names_of: dict[int, list[str]] = {}
    for name, target in targets.items():
        names_of.setdefault(id(target), []).append(name)
    missing = [names[0] for names in names_of.values() if not any(name in staged for name in names)]
    if missing:
        shown = ", ".join(missing[:_NUM_SHOWN]) + (", ..." if len(missing) > _NUM_SHOWN else "")
        raise PublishError(f"{len(missing)} weights of the served model are not in the new ones: {shown}")
    unique: dict[str, torch.Tensor] = {}
    for names in names_of.values():
        present = [name for name in names if name in staged]
        for name in present[1:]:
            if not torch.equal(staged[name], staged[present[0]]):
                raise PublishError(
                    f"{present[0]!r} and {name!r} are one weight in the served model, and differ in the new "
                    f"weights"
                )
        unique[present[0]] = staged[present[0]]
    return unique
