"""Projections of one input as one linear layer: query, key and value (`qkv`), gate and up (`gate_up`).

Owns which projections are packed and how the packed layer answers in their place. The model's own code stays
as it is: it calls `q_proj`, `k_proj` and `v_proj`, which are modules without parameters now; the first call
computes the packed product, the others take their features of it. What is packed from what is told as
`Region`s, and everything that knows checkpoint names (weights, checkpoints, optimizer state, exports) goes
through those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from contract.errors import ModelError
from trainer.config.model import Fusion
from trainer.parallel.layout import Region

_PACKED: dict[Fusion, tuple[str, tuple[str, ...]]] = {
    "qkv": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_up": ("gate_up_proj", ("gate_proj", "up_proj")),
}
"""Fusion to the name of the packed layer and those of its parts, in the order of its rows."""


def fuse_projections(lm: nn.Module, fusions: Sequence[Fusion]) -> dict[str, tuple[Region, ...]]:
    """Pack the projections of every module of `lm` that has them, in place.

    They are found by their names and form, not by the model's class: plain linear layers of the same input
    size and type, with a bias in all or in none, whose parameters belong to no other layer as well.

    Args:
        lm: on the meta device; the packed parameters have no values yet.

    Returns:
        What each packed parameter consists of, by its name in `lm`.

    Raises:
        ModelError: the model has no such projections anywhere.
    """
    assert all(parameter.is_meta for parameter in lm.parameters()), "values would be lost"
    uses = Counter(id(parameter) for _, parameter in lm.named_parameters(remove_duplicate=False))
    packed: dict[str, tuple[Region, ...]] = {}
    for fusion in fusions:
        layer_name, names = _PACKED[fusion]
        found: dict[str, tuple[Region, ...]] = {}
        for path, owner in list(lm.named_modules()):
            parts = _fusable(owner, layer_name, names, uses)
            if parts is not None:
                _replace(owner, layer_name, names, parts)
                found |= _regions(f"{path}." if path else "", layer_name, names, parts)
        if not found:
            raise ModelError(
                f"model.fusions names {fusion!r}, but {type(lm).__name__} has no module with "
                f"{', '.join(names)} as plain linear layers of one input; remove {fusion!r} from "
                f"model.fusions"
            )
        packed |= found
    return packed


class _Product:
    """The output of a packed layer for the latest input, until every part of it is taken.

    The parts of one product are taken within one forward: the same tensor, and weights that have not changed
    since. A part is handed out once, so a caller may change it in place; whoever asks again, in another order
    or with another input, has the product computed anew.
    """

    # No forward hooks to bound its life: torch.compile would compile each layer on its own because of them.

    def __init__(self, layer: nn.Linear, sizes: Sequence[int]) -> None:
        self._layer = layer
        self._sizes = list(sizes)
        self._input: torch.Tensor | None = None
        self._has_graph = False
        self._parts: dict[int, torch.Tensor] = {}

    def take(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Part `index` of the product with `hidden` [..., in features]: [..., features of the part]."""
        has_graph = torch.is_grad_enabled()
        if hidden is not self._input or has_graph != self._has_graph or index not in self._parts:
            # Not `split`: autograd forbids to change its parts in place, as some models do (clipping). One
            # split and not three slices: its backward is one concatenation.
            parts = torch.unsafe_split_with_sizes(self._layer(hidden), self._sizes, dim=-1)
            self._input, self._has_graph, self._parts = hidden, has_graph, dict(enumerate(parts))
        part = self._parts.pop(index)
        if not self._parts:
            # The input would stay alive until the next forward.
            self._input = None
        return part


class _Part(nn.Module):
    """Stands where a projection was. Holds no parameters: the packed layer belongs to the parent module."""

    def __init__(self, product: _Product, index: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self._product = product
        self._index = index
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._product.take(self._index, hidden)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _fusable(
    owner: nn.Module, layer_name: str, names: Sequence[str], uses: Counter[int]
) -> list[nn.Linear] | None:
    """The projections of `owner`, if one linear layer can stand for them."""
    parts: list[nn.Linear] = []
    for name in names:
        part = owner._modules.get(name)
        # Not a subclass: it may compute something else (adapters, quantised weights).
        if type(part) is not nn.Linear:
            return None
        parts.append(part)
    first, parameters = parts[0], [parameter for part in parts for parameter in part.parameters()]
    is_alike = all(
        part.in_features == first.in_features
        and (part.bias is None) == (first.bias is None)
        and part.weight.dtype == first.weight.dtype
        for part in parts
    )
    is_own = all(uses[id(parameter)] == 1 for parameter in parameters)
    return parts if is_alike and is_own and not hasattr(owner, layer_name) else None


def _replace(owner: nn.Module, layer_name: str, names: Sequence[str], parts: Sequence[nn.Linear]) -> None:
    sizes = [part.out_features for part in parts]
    first = parts[0]
    layer = nn.Linear(
        first.in_features, sum(sizes), first.bias is not None, device="meta", dtype=first.weight.dtype
    )
    setattr(owner, layer_name, layer)
    product = _Product(layer, sizes)
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        setattr(owner, name, _Part(product, index, part.in_features, part.out_features))


def _regions(
    prefix: str, layer_name: str, names: Sequence[str], parts: Sequence[nn.Linear]
) -> dict[str, tuple[Region, ...]]:
    rows = list(pairwise(accumulate((part.out_features for part in parts), initial=0)))
    kinds = [kind for kind, _ in parts[0].named_parameters()]
    return {
        f"{prefix}{layer_name}.{kind}": tuple(
            Region(f"{prefix}{name}.{kind}", start, stop)
            for name, (start, stop) in zip(names, rows, strict=True)
        )
        for kind in kinds
    }
