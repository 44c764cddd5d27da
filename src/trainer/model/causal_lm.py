"""The trained module: a transformers causal LM whose logits exist only inside its own forward.

Legend: T tokens of a row, D hidden size, V vocabulary.

The wrapper is the FSDP root, so the weight of the final projection is gathered while the objective runs
inside its forward; the objective then computes logits for the tokens it needs, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from contract.errors import ModelError
from trainer.parallel.layout import LogicalTensor, ModelParameter, Placement, Region, local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RowFunction = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], Any]
_PREFIX = "lm."


class CausalLM(nn.Module):
    """Runs the backbone of `lm` over one packed row, then a function of the final hidden states.

    Args:
        lm: the model.
        packed: what packed parameters consist of, by their name in `lm`; none by default.

    Raises:
        ModelError: `lm` has no separate backbone, no linear output projection, or declares no blocks.
    """

    def __init__(
        self, lm: PreTrainedModel, packed: Mapping[str, tuple[Region, ...]] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.lm = lm
        self.packed = dict(packed)
        """What packed parameters consist of, by their run-time name."""
        self.masters: dict[str, torch.Tensor] = {}
        """This rank's weights in float32 on the host, by run-time name, until whoever updates them has taken
        them over; empty where the parameters are the weights."""
        self._placements: dict[str, Placement] = {}
        saved = self.state_dict(keep_vars=True).keys()
        self._persistent_buffers = {name for name, _ in self.named_buffers() if name in saved}
        head = lm.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"{type(lm).__name__} has no linear output projection; it cannot be trained as a causal LM"
            )
        backbone = lm.base_model
        if backbone is lm:
            raise ModelError(
                f"{type(lm).__name__} has no separate backbone; it cannot be trained as a causal LM"
            )
        text = lm.config.get_text_config()
        # Found once: sharding changes the names of classes.
        names = set(getattr(lm, "_no_split_modules", None) or ())
        self._blocks = [module for module in lm.modules() if type(module).__name__ in names]
        if not self._blocks:
            raise ModelError(f"{type(lm).__name__} declares no blocks to shard; it cannot be trained here")
        self.vocab_size = int(text.vocab_size)
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None)
        # Granite divides logits by a factor, Cohere multiplies them.
        self._logit_factor = getattr(text, "logit_scale", None) or 1.0 / (
            getattr(text, "logits_scaling", None) or 1.0
        )

    def head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] as the model itself would give them, scaling and soft cap included."""
        projection = self.lm.get_output_embeddings()
        assert projection is not None
        logits_NV = projection(hidden_ND)
        if self._logit_factor != 1.0:
            logits_NV = logits_NV * self._logit_factor
        if self._softcap is not None:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV

    def forward(
        self,
        tokens_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        attention: Mapping[str, Any],
        function: RowFunction,
    ) -> Any:
        """`function(hidden_TD, head)` for one row.

        Args:
            tokens_T: [T] token ids.
            position_ids_T: [T] positions, restarting at every document.
            attention: further arguments of the attention (document boundaries).
            function: called inside this forward, while the head's weight is gathered.
        """
        # use_cache must be off and the mask None: otherwise transformers' own attentions let documents see
        # each other.
        output = self.lm.base_model(
            input_ids=tokens_T[None],
            position_ids=position_ids_T[None],
            attention_mask=None,
            use_cache=False,
            **attention,
        )
        return function(output.last_hidden_state[0], self.head)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Forward without gradients or dropout inside.

        The root stays gathered after a forward without backward (the blocks too, where they are not resharded
        after forward), and the registered parameters are then the gathered ones; whoever collects parameters
        next (optimizer, checkpoint) must find the shards again.
        """
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.train()
            # Each unit reshards its own parameters only.
            for module in self.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def blocks(self) -> list[nn.Module]:
        """The decoder blocks, in order: the units of sharding, compilation and activation checkpointing."""
        return list(self._blocks)

    def run_parameters(self) -> dict[str, ModelParameter]:
        """Every parameter as the run holds it, once, and where it lies in the checkpoint; a tied head is its
        embedding.
        """
        found = {name.removeprefix(_PREFIX): parameter for name, parameter in self.named_parameters()}
        return {
            name: ModelParameter(parameter, self.placement(name, parameter), self.masters.get(name))
            for name, parameter in found.items()
        }

    def placement(self, name: str, item: torch.Tensor) -> Placement:
        """Where this rank's shard of `item` lies in the checkpoint; `name` is its run-time name."""
        known = self._placements.get(name)
        # Worked out once, as every save asks; sharding changes it.
        if known is None or known.shape != tuple(item.shape) or known.local_shape != local_part(item).shape:
            known = Placement.of(name, item, self.packed.get(name, ()))
            self._placements[name] = known
        return known

    def block_parameters(self) -> set[str]:
        """Names of the parameters inside the decoder blocks."""
        inside = {id(parameter) for block in self._blocks for parameter in block.parameters()}
        return {name for name, item in self.run_parameters().items() if id(item.parameter) in inside}

    def run_state(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers (e.g. the bias of an expert router) as the run holds them."""
        buffers = {
            name.removeprefix(_PREFIX): item
            for name, item in self.named_buffers()
            if name in self._persistent_buffers
        }
        return {**{name: item.parameter for name, item in self.run_parameters().items()}, **buffers}

    def logical_state(self) -> dict[str, LogicalTensor]:
        """This rank's share of parameters and persistent buffers under their Hugging Face names, as views."""
        state: dict[str, LogicalTensor] = {}
        for name, item in self.run_state().items():
            state |= self.placement(name, item).logical(local_part(item))
        return state
