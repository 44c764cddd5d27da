"""Which model is trained, and how it is laid out on the devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from contract.sections import ModelFilesConfig
from contract.settings import Settings

ActivationCheckpointing = Literal["none", "block"]
Attention = Literal["varlen", "sdpa", "eager", "flash_attention_2"]
Fusion = Literal["qkv", "gate_up"]
Offload = Literal["none", "optimizer", "full"]


class ModelConfig(ModelFilesConfig):
    """The model, where its weights come from and how it computes."""

    init: Literal["pretrained", "random"] = Field(
        default="pretrained",
        description="Load the weights, or draw them at random from the architecture (`seed` decides).",
    )
    attention: Attention = Field(
        default="varlen",
        description="Attention over packed documents. `varlen` computes each document on its own "
        "(variable-length "
        "kernel on CUDA); the others are transformers' implementations.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of forward and backward; weights and optimizer stay float32. auto: bfloat16 on "
        "CUDA, float32 elsewhere.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Type in which gradients are summed over ranks."
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Free a block's gathered weights after its forward; less memory, one more gather.",
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        default="none",
        description="`block` keeps only the input of each block and computes its forward again in backward.",
    )
    offload: Offload = Field(
        default="none",
        description="`optimizer` keeps the optimizer's state in host memory and brings it to the device "
        "for the "
        "update; `full` also keeps float32 weights and gradients there and updates on the host. The "
        "numbers are those "
        "of `none` (with bfloat16 compute on several ranks, `full` rounds the gradient of each micro-batch "
        "to "
        "bfloat16).",
    )
    fusions: list[Fusion] = Field(
        default=[],
        description="Projections computed as one linear layer: `qkv` (q_proj, k_proj, v_proj) and `gate_up` "
        "(gate_proj, up_proj), in every layer that has them. Checkpoints and exports keep the separate "
        "names. Muon orthogonalises a fused matrix as one, so its updates differ from those without fusion.",
    )
    shard_fused_on_dim1: bool = Field(
        default=False,
        description="Shard fused weights by input features, so that every rank holds a part of each row of "
        "q, k and v; the shards must divide the input features. false shards by rows, as all other weights.",
    )
    compile: bool = Field(
        default=False, description="torch.compile of each block; pads rows to seq_len for static shapes."
    )

    @property
    def needs_weights(self) -> bool:
        """See `ModelFilesConfig`."""
        return self.init == "pretrained"

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if len(set(self.fusions)) < len(self.fusions):
            raise ValueError(f"model.fusions = {self.fusions} names a fusion twice; name each once")
        if self.shard_fused_on_dim1 and not self.fusions:
            raise ValueError(
                "model.shard_fused_on_dim1 = true needs fused projections, but model.fusions is empty; set "
                "model.fusions to ['qkv'], ['gate_up'] or both, or remove model.shard_fused_on_dim1"
            )
        return self


class OffloadConfig(Settings):
    """How offloaded state moves between host and device."""

    chunk_mib: float = Field(
        default=256.0,
        ge=0.001,
        description="State moved and updated at once, in MiB; the device holds at most three chunks of it.",
    )


class DeploymentConfig(Settings):
    """Processes and the device mesh."""

    num_processes: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Training processes on this machine; None is one per GPU, or 1 without a GPU.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto takes CUDA where there is a GPU."
    )
    dp_replicate: int = Field(
        default=1,
        ge=1,
        description="Groups of ranks that each hold a whole copy of the model (HSDP); must divide the ranks.",
    )
    num_threads: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="CPU threads per process; None divides the machine's cores among its processes.",
    )
    collective_timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        description="Longest wait for a peer in a collective, in seconds; then the run ends with an error.",
    )
