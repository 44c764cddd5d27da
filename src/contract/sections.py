"""Sections of the configuration that several processes read: model files, logs, the ways between them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from contract.policy import MIN_TEMPERATURE
from contract.settings import Settings

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Name of a run, which is that of its folder."""


class ModelFilesConfig(Settings):
    """Where the model's weights and its tokenizer come from."""

    name: str = Field(
        min_length=1,
        description="Hub id (`Qwen/Qwen3-0.6B`), local folder, `.gguf` file, or `package:NAME/FILE` for a "
        "file inside an installed Python package.",
    )
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit on the Hub; None is the default branch. Only for Hub ids.",
    )
    tokenizer: str | None = Field(
        default=None, description="Tokenizer's Hub id or folder; None takes the model's own."
    )
    chat_template: str | None = Field(
        default=None,
        description="Jinja chat template, or the path of a file that holds one; None takes the tokenizer's.",
    )
    trust_remote_code: bool = Field(default=False, description="Run model code that comes with the weights.")

    @property
    def needs_weights(self) -> bool:
        """Whether a folder without weights is of no use."""
        return True

    @model_validator(mode="after")
    def _check_revision(self) -> ModelFilesConfig:
        if self.revision is not None and self.name.startswith("package:"):
            raise ValueError(
                "model.revision names a version on the Hub, but model.name is a package file; remove "
                "model.revision"
            )
        return self


class LogConfig(Settings):
    """Console and log files."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe message shown; debug also shows tracebacks."
    )


class FilesystemChannelConfig(Settings):
    """Batches as files in the run folder, which the orchestrator's and the trainer's machine share."""

    type: Literal["filesystem"] = "filesystem"


class ZmqChannelConfig(Settings):
    """Batches over a TCP connection."""

    type: Literal["zmq"] = "zmq"
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Name or address at which the trainer reaches the orchestrator.",
    )
    bind: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Address that the orchestrator binds, if it is another one: `0.0.0.0` is every address "
        "of its machine. None is host.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Port that the orchestrator binds; None is a free one."
    )

    @property
    def bound(self) -> str:
        """Address that the orchestrator binds."""
        return self.bind or self.host


ChannelConfig = Annotated[FilesystemChannelConfig | ZmqChannelConfig, Field(discriminator="type")]


class FilesystemPublishConfig(Settings):
    """Weights as safetensors files in the run folder, which the policy server's machine shares."""

    type: Literal["filesystem"] = "filesystem"
    keep_last: int = Field(default=2, ge=1, description="Published versions kept on disk.")
    timeout_seconds: float = Field(
        default=600.0, gt=0, description="Longest wait until the policy server has loaded a version."
    )


class CollectivePublishConfig(Settings):
    """Weights broadcast from the trainer's first rank to the policy servers, bucket by bucket."""

    type: Literal["collective"] = "collective"
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="auto is nccl where trainer and server have GPUs of their own."
    )
    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address of the trainer's first rank for the servers."
    )
    bucket_mib: float = Field(
        default=64.0, gt=0, description="Weights gathered and broadcast at a time, in MiB."
    )
    timeout_seconds: float = Field(
        default=600.0, gt=0, description="Longest wait until the policy server has loaded a version."
    )


PublishConfig = Annotated[FilesystemPublishConfig | CollectivePublishConfig, Field(discriminator="type")]


class SamplingConfig(Settings):
    """How tokens are drawn from the policy."""

    temperature: float = Field(
        default=1.0,
        ge=0,
        description="Logits are divided by this; log-probabilities are those of the divided logits. 0 takes "
        "the most likely token, which only an evaluation can.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Draw from the most likely tokens that hold this probability; below 1 only in an "
        "evaluation, as the trainer's probabilities are of all tokens.",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        description="Draw from this many most likely tokens; 0 is all. Above 0 only in an evaluation.",
    )
    max_tokens: int = Field(default=256, ge=1, description="Longest turn of the policy, in tokens.")
    min_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens of a turn before it may end (end tokens are not drawn before). Above 0 only in "
        "an evaluation.",
    )
    stop: list[str] = Field(default=[], description="Texts at which a turn ends.")

    @model_validator(mode="after")
    def _check(self) -> SamplingConfig:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature = {self.temperature:g} must be 0, or a number from {MIN_TEMPERATURE:g}"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens = {self.min_tokens} is more than max_tokens = {self.max_tokens}; lower it"
            )
        return self
