"""Copies of the metrics for experiment trackers: Weights & Biases and TensorBoard.

Neither is vital: what fails here is counted by `Metrics` and does not end the run. Both are imported only
when used. A run that is resumed does steps again; both trackers then show the values of the last attempt.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import ConfigError
from telemetry.metrics import Value

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)


class WandbSink:
    """Weights & Biases, online or offline; every attempt of a run continues the same W&B run.

    Steps are a metric of their own (`step`), on which all charts stand. W&B's internal step may only grow, so
    it is the number of the record: steps that are done again after a crash are not dropped.

    Offline, each attempt writes a folder `wandb/offline-run-*-<run id>`; `wandb sync <run
    folder>/wandb/offline-run-*` merges them, in the order of their start, into one run.
    """

    name = "Weights & Biases"
    is_vital = False

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        run_id: str | None,
        num_earlier_records: int,
        entity: str | None = None,
        run_name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        offline: bool = False,
        config: Mapping[str, Any] | None = None,
        init_timeout_seconds: float = 60.0,
    ) -> None:
        """Start or continue the W&B run. A server that cannot be reached turns this attempt offline, with a
        warning.

        Args:
            folder: the run folder; files go to `wandb/` inside it.
            run_id: id of the W&B run to continue; None makes a new one (see `run_id`).
            num_earlier_records: `JsonlSink.num_records` before the first record of this attempt.
            config: resolved configuration, shown with the run.
            init_timeout_seconds: longest wait for the server, in seconds.

        Raises:
            ConfigError: online, and this machine is not logged in to W&B.
        """
        import wandb

        # The configuration decides the mode, whatever the environment says.
        wandb.setup(wandb.Settings(silent=True, mode="offline" if offline else "online"))
        self.run_id = run_id or secrets.token_hex(4)
        """Belongs into the checkpoint: it is what a resumed run continues under."""
        self._num_records = num_earlier_records
        if not offline:
            _require_login()
        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            # Its capture of the terminal and its banner would tear the live panel.
            console="off",
            silent=True,
            init_timeout=init_timeout_seconds,
        )
        arguments: dict[str, Any] = {
            "dir": str(folder),
            "project": project,
            "entity": entity,
            "name": run_name,
            "group": group,
            "tags": list(tags),
            "config": dict(config or {}),
            "id": self.run_id,
            "resume": "allow",
            "settings": settings,
        }
        self._run = _start_offline(arguments) if offline else _start_online(arguments)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    @property
    def is_offline(self) -> bool:
        """Whether this attempt writes to the run folder only."""
        return self._run.offline

    @property
    def url(self) -> str | None:
        """Page of the run; None offline."""
        return None if self.is_offline else self._run.url

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        shown = {key: value for key, value in values.items() if value is not None}
        self._run.log({"step": step, **shown}, step=self._num_records)
        self._num_records += 1

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _require_login() -> None:
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "wandb is on, but this machine is not logged in to Weights & Biases; run `wandb login`, set "
            "WANDB_API_KEY in the environment, or use --wandb.offline or --no-wandb"
        )


def _start_offline(arguments: Mapping[str, Any]) -> wandb.Run:
    import wandb

    return wandb.init(mode="offline", **arguments)


def _start_online(arguments: Mapping[str, Any]) -> wandb.Run:
    import wandb
    from wandb.errors import AuthenticationError, CommError

    try:
        return wandb.init(mode="online", **arguments)
    except AuthenticationError as error:
        raise ConfigError(
            f"Weights & Biases refused this machine's key: {error}; run `wandb login --relogin`, or use "
            "--wandb.offline or --no-wandb"
        ) from error
    except CommError as error:
        logger.warning(
            "Weights & Biases cannot be reached (%s); this attempt is recorded offline: upload it later with "
            "`wandb sync %s/wandb/offline-run-*`",
            error,
            arguments["dir"],
        )
        # The run that could not start still holds its id inside W&B's service process.
        wandb.teardown()
        return _start_offline(arguments)


class TensorboardSink:
    """TensorBoard event files. Numbers become scalars, strings become texts; so does the configuration."""

    name = "TensorBoard"
    is_vital = False

    def __init__(
        self,
        folder: Path,
        *,
        flush_seconds: int,
        first_step: int,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a new event file in `folder`.

        Args:
            flush_seconds: longest time until an event is on disk, in seconds.
            first_step: first step that this attempt does, from 1; what earlier attempts wrote of it and of
                later steps is hidden by TensorBoard.
            config: resolved configuration, shown as JSON before that step.
        """
        from torch.utils.tensorboard import SummaryWriter

        purge_step = first_step if first_step > 1 else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=flush_seconds)
        if config is not None:
            # Indented, as Markdown has it for what must stay as it is.
            lines = json.dumps(config, indent=2).splitlines()
            self._writer.add_text("config", "\n".join(f"    {line}" for line in lines), first_step - 1)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        for key, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, step)
            elif value is not None:
                self._writer.add_scalar(key, float(value), step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()
