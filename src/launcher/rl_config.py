"""The configuration of an RL run: everything is set once here, and every process gets its share.

`RLConfig` is the trainer's configuration with the sections of the other processes beside it; where two
processes need one value (`seq_len`, `model`, `channel`, `seed`), it has one key.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from contract.sections import LogConfig, ModelFilesConfig
from inference.config import InferenceConfig, ServerSection
from orchestrator.config import OrchestratorConfig, RolloutSections
from trainer.config import RLTrainConfig

_SERVER = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[^\s/:]+):\d+/?")


class RLConfig(RolloutSections, RLTrainConfig):
    """Reinforcement learning of a causal language model."""

    inference: ServerSection = Field(default=ServerSection(), description="The policy server.")
    server_start_seconds: float = Field(
        default=600.0,
        gt=0,
        description="Longest wait until every policy server has loaded the model and answers, in seconds.",
    )
    watchdog_minutes: Annotated[float, Field(gt=0)] | None = Field(
        default=60.0,
        description="The run ends with an error when no step was finished for so long, and every process "
        "writes where it stands to its log; None waits for ever.",
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> RLConfig:
        if self.sampling.max_tokens >= self.seq_len:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in seq_len = "
                f"{self.seq_len}; lower it, or raise seq_len"
            )
        if self.inference.max_len is not None and self.inference.max_len < self.seq_len:
            raise ValueError(
                f"inference.max_len = {self.inference.max_len} is less than seq_len = "
                f"{self.seq_len}; remove it"
            )
        return self

    @model_validator(mode="after")
    def _check_servers(self) -> RLConfig:
        for server in self.servers:
            if not _SERVER.fullmatch(server):
                raise ValueError(f"servers: {server!r} is no address; write `http://host:port`")
        changed = [name for name, value in self.inference if value != getattr(ServerSection(), name)]
        if self.servers and changed:
            raise ValueError(
                f"servers = {self.servers} run already, so inference.{changed[0]} would change nothing; "
                f"remove it, or remove servers to have one started"
            )
        if self.server_key is not None and not self.servers:
            raise ValueError(
                "server_key is for servers that run already, and servers is empty; the key of the one that "
                "is started is inference.api_key"
            )
        return self

    @model_validator(mode="after")
    def _check_resume(self) -> RLConfig:
        resume = self.resume
        if resume is not None and resume.skip_progress != resume.skip_data:
            raise ValueError(
                "resume.skip_progress and resume.skip_data go together in RL: batches are numbered by steps, "
                "so both go on or both start anew; set both, or neither"
            )
        return self

    @property
    def key(self) -> str | None:
        """API key of the policy servers, whoever started them."""
        return self.server_key if self.servers else self.inference.api_key

    def trainer(self, servers: list[str]) -> RLTrainConfig:
        """The trainer's share.

        Args:
            servers: addresses of the policy servers.
        """
        names = RLTrainConfig.model_fields.keys()
        values = {name: value for name, value in self if name in names}
        return RLTrainConfig(**{**values, "servers": servers, "server_key": self.key})

    def orchestrator(self, servers: list[str], resume_dir: str | None) -> OrchestratorConfig:
        """The orchestrator's share.

        Args:
            servers: addresses of the policy servers.
            resume_dir: folder of the checkpoint that the run goes on from.
        """
        names = OrchestratorConfig.model_fields.keys()
        values = {name: value for name, value in self if name in names}
        return OrchestratorConfig(
            **{
                **values,
                "model": self._model_files(),
                "servers": servers,
                "server_key": self.key,
                "resume_dir": resume_dir,
                "log": self._part_log(),
            }
        )

    def policy_server(self, port: int, run_id: str) -> InferenceConfig:
        """The policy server's share."""
        engine, dtype = self.inference.engine, self.model.compute_dtype
        if dtype == "auto" and self.deployment.device == "cpu":
            dtype = "float32"
        if engine.dtype == "auto" and dtype != "auto":
            # Of another type it would give tokens other probabilities than the trainer does.
            engine = engine.model_copy(update={"dtype": dtype})
        return InferenceConfig(
            **{
                **dict(self.inference),
                "engine": engine,
                "model": self._model_files(),
                "port": port,
                "max_len": self.inference.max_len or self.seq_len,
                "run_id": run_id,
                "log": self._part_log(),
            }
        )

    def _part_log(self) -> LogConfig:
        return LogConfig(level=self.log.level)

    def _model_files(self) -> ModelFilesConfig:
        return ModelFilesConfig(**{name: getattr(self.model, name) for name in ModelFilesConfig.model_fields})
