"""Where an RL run begins: the step that it goes on from, decided once for all parts; and what an earlier
attempt left on its way.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass

from contract.attempt import write_whole
from contract.choice import choose_checkpoint
from contract.errors import RunFolderError
from contract.layout import RunFolder
from contract.store import Folder
from launcher.rl_config import RLConfig

_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Start:
    """The step from which all parts go on.

    Attributes:
        checkpoint: None starts from the model as loaded.
        warnings: newer steps that cannot be used, and why.
    """

    step: int = 0
    checkpoint: Folder | None = None
    warnings: tuple[str, ...] = ()

    def resume_dir(self, config: RLConfig) -> str | None:
        """The orchestrator's checkpoint; None where it starts anew."""
        if self.checkpoint is None or (config.resume is not None and config.resume.skip_progress):
            return None
        return str(self.checkpoint)

    def fixed(self, config: RLConfig) -> RLConfig:
        """`config` with this checkpoint in `resume`, so that no part chooses another one."""
        if config.resume is None:
            return config
        if self.checkpoint is None:
            return config.model_copy(update={"resume": None})
        # By its folder: where steps are counted anew, the number of the checkpoint is not that of the start.
        update = {"step": None, "dir": str(self.checkpoint)}
        return config.model_copy(update={"resume": config.resume.model_copy(update=update)})


def decide_start(config: RLConfig, folder: RunFolder) -> Start:
    """Choose the step.

    Raises:
        CheckpointError: there is nothing to resume, or what `resume` names cannot be loaded.
    """
    resume = config.resume
    if resume is None:
        return Start()
    # A run that starts its tasks anew needs the weights only, which may be those of an SFT run.
    components = ("trainer",) if resume.skip_progress else ("trainer", "orchestrator")
    found = choose_checkpoint(
        folder, step=resume.step, place=resume.dir, components=components, num_own_attempts=0
    )
    if found is None:
        return Start()
    step = 0 if resume.skip_progress else found.entry.step
    return Start(step, found.entry.path, found.warnings)


def remove_leftovers(folder: RunFolder) -> None:
    """Remove batches and weights that were on their way: nobody may take them for those of the attempt that
    begins.

    Raises:
        RunFolderError: it cannot be removed.
    """
    try:
        for path in (folder.channel, folder.broadcasts):
            if path.exists():
                shutil.rmtree(path)
    except OSError as error:
        raise RunFolderError(
            f"what an earlier attempt left in {folder.root} cannot be removed: {error.strerror} "
            f"({error.filename}); give yourself the right to, or choose another run_name"
        ) from error


def run_id_of(folder: RunFolder) -> str:
    """The id of the run in `folder`, made at its first start."""
    if folder.run_id.exists():
        found = folder.run_id.read_text().strip()
        if found:
            return found
    made = secrets.token_hex(_ID_BYTES)
    write_whole(folder.run_id, made + "\n")
    return made
