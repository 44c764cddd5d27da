"""The configuration of an RL run: everything is set once here, and every process gets its share.

`RLConfig` is the trainer's configuration with the sections of the other processes beside it; where two
processes need one value (`seq_len`, `model`, `channel`, `seed`), it has one key.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from contract.sections import ModelFilesConfig
from inference.config import InferenceConfig, ServerSection
from orchestrator.config import OrchestratorConfig, RolloutSections
from trainer.config import RLTrainConfig


class RLConfig(RolloutSections, RLTrainConfig):
    """Reinforcement learning of a causal language model."""

    inference: ServerSection = Field(default=ServerSection(), description="The policy server.")

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

    def trainer(self, servers: list[str]) -> RLTrainConfig:
        """The trainer's share.

        Args:
            servers: addresses of the policy servers.
        """
        names = RLTrainConfig.model_fields.keys()
        values = {name: value for name, value in self if name in names}
        return RLTrainConfig(**{**values, "servers": servers, "server_key": self.inference.api_key})

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
                "server_key": self.inference.api_key,
                "resume_dir": resume_dir,
            }
        )

    def policy_server(self, port: int, run_id: str) -> InferenceConfig:
        """The policy server's share."""
        section = dict(self.inference)
        return InferenceConfig(
            **{
                **section,
                "model": self._model_files(),
                "port": port,
                "max_len": self.inference.max_len or self.seq_len,
                "run_id": run_id,
                "log": self.log,
            }
        )

    def _model_files(self) -> ModelFilesConfig:
        return ModelFilesConfig(**{name: getattr(self.model, name) for name in ModelFilesConfig.model_fields})
