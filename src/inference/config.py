"""The configuration of a policy server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from contract.sections import LogConfig, ModelFilesConfig
from contract.settings import Settings
from contract.settings.base import PathSetting


class EmbeddedEngineConfig(Settings):
    """A transformers model in the server's own process."""

    type: Literal["embedded"] = "embedded"
    max_batch: int = Field(
        default=32,
        ge=1,
        description="Sequences drawn at a time; more wait. The key-value cache holds so many, each as long "
        "as the longest one so far.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of weights and computation; auto: that of the trainer where a run sets it "
        "(model.compute_dtype, or float32 with deployment.device = 'cpu'), else bfloat16 on CUDA and float32 "
        "elsewhere.",
    )


EngineConfig = EmbeddedEngineConfig
"""The engines; more of them make this a union with discriminator `type`."""


class ServerSection(Settings):
    """How the policy is served; the section `inference` of an RL run."""

    engine: EngineConfig = Field(default=EmbeddedEngineConfig(), description="What computes.")
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="`cpu`, `cuda` or `cuda:N`; auto takes the last GPU, or the CPU without one.",
    )
    num_threads: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="CPU threads; None is all cores."
    )
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to bind. Whoever reaches it can use the policy and replace its weights: set "
        "api_key before you open it to others.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Port to bind; None is a free one."
    )
    api_key: str | None = Field(
        default=None, min_length=1, description="Key that every request must bring; None asks for none."
    )
    max_len: Annotated[int, Field(ge=8)] | None = Field(
        default=None,
        description="Longest sequence, prompt included, in tokens; None is seq_len of the run, or else what "
        "the model was made for.",
    )
    pause_mode: Literal["keep", "wait", "abort"] = Field(
        default="keep",
        description="Running requests during a weight update: keep them where they are and go on with the "
        "new weights, wait until they are finished, or abort them.",
    )
    served_name: str | None = Field(
        default=None, description="Model name of the OpenAI routes; None is model.name."
    )

    @model_validator(mode="after")
    def _check_exposure(self) -> ServerSection:
        if self.api_key is None and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(
                f"host = {self.host!r} can be reached by others, and api_key is not set: anyone could "
                f"replace the weights; set api_key, or host = '127.0.0.1'"
            )
        return self


class InferenceConfig(ServerSection):
    """A policy server on its own."""

    model: ModelFilesConfig = Field(description="The model.")
    run_id: str = Field(
        default="",
        description="Id of the run that the server belongs to: it takes weights of that run alone, and its "
        "version is -1 until the run's trainer has given it some. Empty takes them of whichever trainer "
        "begins, and the model as loaded is version 0.",
    )
    log_file: PathSetting | None = Field(
        default=None, description="File that takes the log beside the console; None is none."
    )
    log: LogConfig = Field(default=LogConfig(), description="Console and log files.")
