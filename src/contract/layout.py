"""The run folder: where every file of a run lies. One object, used by every process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from contract.errors import RunFolderError
from contract.store import Folder, StoreFolder


def cache_folder() -> Path:
    """What can be made again, shared by runs: `$XDG_CACHE_HOME/tailrace`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside `<output_dir>/<run_name>`; creates nothing.

    Attributes:
        store: where checkpoints lie if not in the run folder.
    """

    root: Path
    store: StoreFolder | None = None

    @classmethod
    def of_run(cls, output_dir: Path, run_name: str, store_url: str | None) -> RunFolder:
        """The folder of the run with this name.

        Args:
            store_url: `ckpt.url` of its configuration: the run's checkpoints lie in
                `<store_url>/<run_name>/checkpoints/`.
        """
        store = None if store_url is None else StoreFolder(store_url) / run_name / "checkpoints"
        return cls(output_dir.expanduser() / run_name, store)

    @property
    def steps(self) -> Folder:
        """The checkpoints of the run, wherever they lie."""
        return self.checkpoints if self.store is None else self.store

    @property
    def config(self) -> Path:
        """Resolved configuration of each process: `config/<process>.toml`."""
        return self.root / "config"

    @property
    def checkpoints(self) -> Path:
        """`step_N/` (committed) and `step_N.partial/` (being written); see `steps`."""
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Hugging Face exports: `step_N/`."""
        return self.root / "weights"

    @property
    def broadcasts(self) -> Path:
        """Policy weights for the policy server (filesystem publisher): `version_N/`."""
        return self.root / "broadcasts"

    @property
    def rollouts(self) -> Path:
        """Episodes, readable: `step_N.jsonl` as they were trained on; evaluations: `eval_version_N.jsonl`."""
        return self.root / "rollouts"

    @property
    def channel(self) -> Path:
        """Batches on their way to the trainer (filesystem channel)."""
        return self.root / "channel"

    @property
    def run_id(self) -> Path:
        """File with the id that messages of this run carry; made with the folder, kept over resumes."""
        return self.root / "run_id"

    @property
    def metrics(self) -> Path:
        """Strict JSON, one object a line; the source of truth."""
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """`attempt_K/*.log`, one per process; `latest` points to the newest."""
        return self.root / "logs"

    @property
    def control(self) -> Path:
        """What `ckpt` asks of the running attempt, and its answers; see `contract.control`."""
        return self.root / "control"

    @property
    def paused(self) -> Path:
        """Exists while the run is paused: at which step, why, and whether that step was saved."""
        return self.root / "paused.json"

    @property
    def traces(self) -> Path:
        """Profiler traces."""
        return self.root / "traces"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tensorboard"

    def read_run_id(self) -> str:
        """The id that messages of this run carry.

        Raises:
            RunFolderError: the run has none.
        """
        try:
            return self.run_id.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise RunFolderError(
                f"{self.run_id}, by which the processes of an RL run know each other, cannot be read "
                f"({error.strerror}); `rl` makes it when it starts the run"
            ) from error

    def holds_run(self) -> bool:
        """Whether a run was begun here: metrics or any checkpoint exist. A lone `config/` (from --dry-run)
        is none.
        """
        has_checkpoint = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return (
            has_checkpoint or self.metrics.exists() or (self.weights.is_dir() and any(self.weights.iterdir()))
        )
