"""The configuration of the orchestrator: tasks, episodes, groups, batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from contract.sections import (
    ChannelConfig,
    FilesystemChannelConfig,
    LogConfig,
    ModelFilesConfig,
    RunName,
    SamplingConfig,
)
from contract.settings import Settings
from contract.settings.base import PathSetting


class SourceConfig(Settings):
    """A source of tasks."""

    environment: str = Field(
        pattern=r"^[\w.-]+(:[\w.]+)?$",
        description="A built-in environment (`reverse-text`, `sort-letters`, `arithmetic`, `guess-number`, "
        "`calculator`), or the import path of a class of yours, `package.module:Class`.",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+$",
        description="Name in metrics; None is that of the environment. Two sources need two names.",
    )
    weight: float = Field(default=1.0, gt=0, description="Share of the tasks, relative to other sources.")
    settings: dict[str, Any] = Field(
        default={}, description="Arguments of the environment, see docs/environments.md."
    )
    num_workers: int = Field(
        default=1, ge=1, description="Worker processes that run this environment's code."
    )
    timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        description="Longest call of the environment's code, in seconds; then its worker is replaced and the "
        "episode counts as failed.",
    )

    @property
    def title(self) -> str:
        """`name`, or a name made from the environment."""
        return self.name or self.environment.rpartition(":")[2]


class GRPOConfig(Settings):
    """Reward minus the mean of the group (GRPO, https://arxiv.org/abs/2402.03300)."""

    type: Literal["grpo"] = "grpo"
    normalize_std: bool = Field(
        default=False, description="Also divide by the standard deviation of the group's rewards."
    )


class RLOOConfig(Settings):
    """Reward minus the mean of the others of the group (RLOO, https://arxiv.org/abs/2402.14740)."""

    type: Literal["rloo"] = "rloo"


AlgorithmConfig = Annotated[GRPOConfig | RLOOConfig, Field(discriminator="type")]


class RolloutConfig(Settings):
    """How far and how wide the orchestrator works."""

    group_size: int = Field(default=8, ge=1, description="Episodes of each task.")
    groups_per_batch: int = Field(default=8, ge=1, description="Tasks per update.")
    max_lead: int = Field(
        default=1,
        ge=0,
        description="Batches that may be sampled ahead of the trainer; 0 samples every batch with the "
        "weights that it will be trained from (on-policy).",
    )
    max_off_policy_steps: int = Field(
        default=4,
        ge=0,
        description="Most updates between the weights that sampled a token and those it is trained from; "
        "older groups are dropped, counted, and sampled again. Bounds the lead, too.",
    )
    max_concurrent: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Episodes at a time; None is those of one batch and of those that may be sampled ahead.",
    )
    on_no_signal: Literal["refill", "shrink"] = Field(
        default="refill",
        description="A group whose episodes all have the same reward teaches nothing and is dropped: refill "
        "samples another task in its place, shrink trains a smaller batch.",
    )
    max_empty_batches: int = Field(
        default=8,
        ge=1,
        description="The run ends with an error when this many batches' worth of groups in a row had no "
        "signal, or failed.",
    )
    max_error_rate: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Greatest share of failed episodes among the last 100; beyond it the run ends with the "
        "first error.",
    )
    request_timeout_seconds: float = Field(
        default=3600.0,
        gt=0,
        description="Longest wait for one turn of the policy, in seconds. Waiting in the policy server's "
        "queue counts: it draws for `inference.engine.max_batch` requests at a time.",
    )
    episode_timeout_seconds: float = Field(
        default=7200.0,
        gt=0,
        description="Longest episode, all its turns and calls together, in seconds; then it counts as "
        "failed.",
    )
    server_patience_seconds: float = Field(
        default=60.0,
        gt=0,
        description="Longest time for which the policy server may be out of reach, in seconds.",
    )
    version_timeout_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="Longest wait for the trainer, in seconds: for the first version of the policy, for the "
        "next, and for the acknowledgement of the end.",
    )

    @property
    def lead(self) -> int:
        """Batches that are in fact sampled ahead: further ahead than the greatest age, all is too old."""
        return min(self.max_lead, self.max_off_policy_steps)

    @property
    def batch_size(self) -> int:
        """Episodes per update."""
        return self.group_size * self.groups_per_batch


class EvaluationConfig(Settings):
    """Held-out tasks, answered every few steps and never trained."""

    sources: list[SourceConfig] = Field(min_length=1, description="Sources of held-out tasks.")
    interval: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Updates between evaluations; None is only before and after training."
    )
    at_start: bool = Field(default=True, description="Also evaluate before the first update.")
    num_tasks: int = Field(default=64, ge=1, description="Tasks of each source, from its first.")
    num_samples: int = Field(
        default=1, ge=1, description="Episodes of each task; pass@k is reported for k up to this."
    )
    sampling: SamplingConfig | None = Field(
        default=None, description="How tokens are drawn; None is as in training."
    )
    pass_threshold: float = Field(
        default=1.0, description="An episode with at least this reward counts as passed in pass@k."
    )
    num_printed: int = Field(default=2, ge=0, description="Episodes shown on the console per evaluation.")


class RolloutSections(Settings):
    """The orchestrator's sections of an RL run."""

    sources: list[SourceConfig] = Field(min_length=1, description="Sources of tasks.")
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="How tokens are drawn.")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="Groups and batches.")
    algorithm: AlgorithmConfig = Field(default=GRPOConfig(), description="Credit of the episodes of a group.")
    evaluation: EvaluationConfig | None = Field(default=None, description="Held-out tasks; None has none.")

    @model_validator(mode="after")
    def _check_rollout(self) -> RolloutSections:
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0 always draws the same episode, so no group has a signal; set it "
                "above 0 (an evaluation may use 0: evaluation.sampling)"
            )
        self._check_support()
        if self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size = {self.rollout.group_size} leaves nothing to compare an episode with; "
                f"set it to 2 or more"
            )
        groups = [("sources", self.sources)]
        if self.evaluation is not None:
            groups.append(("evaluation.sources", self.evaluation.sources))
            self._check_held_out(self.evaluation)
        for key, sources in groups:
            titles = [source.title for source in sources]
            twice = sorted({title for title in titles if titles.count(title) > 1})
            if twice:
                raise ValueError(f"{key}: two are called {twice[0]!r}; give each a `name` of its own")
        return self

    def _check_held_out(self, evaluation: EvaluationConfig) -> None:
        for source in evaluation.sources:
            if source.weight != 1.0:
                raise ValueError(
                    f"evaluation.sources: weight = {source.weight:g} of {source.title!r} would change "
                    f"nothing, as an evaluation answers num_tasks = {evaluation.num_tasks} of every source; "
                    f"remove it"
                )

    def _check_support(self) -> None:
        """The trainer's probabilities are of all tokens; what is trained must be drawn from all, too."""
        drawn, full = self.sampling, SamplingConfig()
        for name in ("top_p", "top_k", "min_tokens"):
            value, neutral = getattr(drawn, name), getattr(full, name)
            if value != neutral:
                raise ValueError(
                    f"sampling.{name} = {value} draws from a part of the tokens, and the trainer computes "
                    f"probabilities over all of them: every importance ratio would be wrong, also that of an "
                    f"unchanged policy. Set it to {neutral:g}, or remove it; sampling.temperature is free, "
                    f"and an evaluation may use it: evaluation.sampling.{name}"
                )


class OrchestratorConfig(RolloutSections):
    """The orchestrator on its own; made from the configuration of the run."""

    output_dir: PathSetting = Field(description="Folder that holds run folders.")
    run_name: RunName = Field(description="Name of the run's folder in output_dir.")
    seed: int = Field(default=0, ge=0, lt=2**62, description="Decides the order of tasks and sampling.")
    max_steps: int = Field(ge=1, description="Updates in the run.")
    seq_len: int = Field(ge=8, description="Longest sample, prompt included, in tokens.")
    model: ModelFilesConfig = Field(description="The model, for its tokenizer.")
    channel: ChannelConfig = Field(
        default=FilesystemChannelConfig(), description="The way of batches to the trainer."
    )
    servers: list[str] = Field(min_length=1, description="Policy servers, as `http://host:port`.")
    server_key: str | None = Field(default=None, description="API key of the policy servers.")
    resume_dir: str | None = Field(
        default=None, description="Checkpoint folder to go on from; None starts a new run."
    )
    log: LogConfig = Field(default=LogConfig(), description="Console and log files.")
