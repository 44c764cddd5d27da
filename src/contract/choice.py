"""Which checkpoint a run goes on from; read without torch, so that a launcher can decide it for all
processes.
"""

from __future__ import annotations

from collections.abc import Collection

from contract.commit import ResolvedStep, inspect_step, resolve_step, scan
from contract.errors import CheckpointError
from contract.layout import RunFolder
from contract.store import Folder, parse_folder


def choose_checkpoint(
    folder: RunFolder,
    *,
    step: int | None,
    place: str | None,
    components: Collection[str] = ("trainer",),
    num_own_attempts: int = 1,
) -> ResolvedStep | None:
    """The checkpoint that `resume` names: `step` of this run, the one at `place`, or else the latest of this
    run.

    Args:
        components: what the checkpoint must hold.
        num_own_attempts: attempt folders that the present launch has made already.

    Returns:
        None if this run was begun but died before its first checkpoint: it then starts at step 0, so that one
        command (`--resume`) can always be repeated.

    Raises:
        CheckpointError: there is nothing to resume, or what is named cannot be loaded.
    """
    if place is not None:
        return _at(parse_folder(place), components)
    found = resolve_step(folder.steps, step, components=components)
    if found is None and not _died_before_first_save(folder, num_own_attempts):
        raise CheckpointError(
            f"resume is set, but {folder.steps} holds no checkpoint; remove `--resume` to start a "
            "new run, or name a checkpoint of another run with resume.dir"
        )
    return found


def _died_before_first_save(folder: RunFolder, num_own_attempts: int) -> bool:
    """Whether an earlier attempt began this run and never saved; an emptied folder does not count."""
    if folder.metrics.exists():
        return '"checkpoint/step"' not in folder.metrics.read_text(errors="replace")
    return len(list(folder.logs.glob("attempt_*"))) > num_own_attempts


def _at(path: Folder, components: Collection[str]) -> ResolvedStep:
    """One step folder; or a checkpoints or run folder that holds exactly one step that can be loaded."""
    if not path.is_dir():
        raise CheckpointError(f"resume.dir = {str(path)!r}: there is no such folder")
    checkpoints = next((place for place in (path, path / "checkpoints") if scan(place)), None)
    if checkpoints is not None:
        steps = [entry.step for entry in scan(checkpoints) if entry.state == "committed"]
        if len(steps) > 1:
            raise CheckpointError(
                f"resume.dir = {str(path)!r} holds several checkpoints (steps {', '.join(map(str, steps))}); "
                f"name one of them, e.g. {str(checkpoints / f'step_{steps[-1]}')!r}"
            )
        resolved = resolve_step(checkpoints, components=components)
        if resolved is None:
            raise CheckpointError(f"resume.dir = {str(path)!r}: no checkpoint was ever committed there")
        return resolved
    entry = inspect_step(path)
    if entry.problem is not None or entry.record is None:
        raise CheckpointError(f"resume.dir = {str(path)!r} cannot be loaded: {entry.problem}")
    missing = [name for name in components if name not in entry.record.components]
    if missing:
        raise CheckpointError(
            f"resume.dir = {str(path)!r} holds no state of: {', '.join(missing)}; name a checkpoint that does"
        )
    return ResolvedStep(entry, entry.record, ())
