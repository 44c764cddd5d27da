"""The checkpoints of a run in an object store, before the run: may the place be used, what does `clean`
delete.
"""

from __future__ import annotations

from contract.commit import remove_step, scan, scan_superseded
from contract.errors import RunFolderError
from contract.layout import RunFolder


def check_usable(folder: RunFolder, *, resume: bool, clean: bool) -> None:
    """Refuse a place in a store that holds steps already, unless the command says what to do with them.

    Raises:
        RunFolderError: it holds steps of another run.
        CheckpointError: the store does not answer, or refuses.
    """
    if folder.store is None or resume or clean:
        return
    steps = scan(folder.store)
    if steps:
        raise RunFolderError(
            f"{folder.store} holds checkpoints already (the latest is step {steps[-1].step}), and nothing "
            "was started. Go on with that run: --resume; delete them and start anew: --clean; keep them and "
            "start another: --run-name NAME"
        )


def clean_steps(folder: RunFolder) -> None:
    """Delete all steps that the run has in a store; nothing else there.

    Raises:
        CheckpointError: the store does not answer, or refuses.
        RunFolderError: a step cannot be deleted.
    """
    if folder.store is None:
        return
    for entry in [*scan(folder.store), *scan_superseded(folder.store)]:
        try:
            remove_step(entry.path)
        except OSError as error:
            raise RunFolderError(f"{entry.path} cannot be deleted: {error.strerror}") from error
