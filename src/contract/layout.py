"""The run folder: where every file of a run lies. One object, used by every process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def cache_folder() -> Path:
    """What can be made again, shared by runs: `$XDG_CACHE_HOME/tailrace`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside `<output_dir>/<run_name>`; creates nothing."""

    root: Path

    @property
    def config(self) -> Path:
        """Resolved configuration of each process: `config/<process>.toml`."""
        return self.root / "config"

    @property
    def checkpoints(self) -> Path:
        """`step_N/` (committed) and `step_N.partial/` (being written)."""
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Hugging Face exports: `step_N/`."""
        return self.root / "weights"

    @property
    def metrics(self) -> Path:
        """Strict JSON, one object a line; the source of truth."""
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """`attempt_K/*.log`, one per process; `latest` points to the newest."""
        return self.root / "logs"

    @property
    def traces(self) -> Path:
        """Profiler traces."""
        return self.root / "traces"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tensorboard"

    def holds_run(self) -> bool:
        """Whether a run was begun here: metrics or any checkpoint exist. A lone `config/` (from --dry-run)
        is none.
        """
        has_checkpoint = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return (
            has_checkpoint or self.metrics.exists() or (self.weights.is_dir() and any(self.weights.iterdir()))
        )
