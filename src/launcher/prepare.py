"""What every command that starts a run does first: read the configuration, refuse, and prepare the run
folder.

Everything that can be refused is refused before a file of an earlier run is touched.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from contract import control
from contract.errors import ConfigError, RunFolderError, TailraceError
from contract.layout import RunFolder
from contract.model_files import find_local
from contract.settings.dump import to_toml
from contract.settings.load import Loaded, load_settings
from contract.store import StoreFolder, check_installed
from launcher import folder as run_folder
from launcher import store
from launcher.output import lasting_console
from trainer.config.train import TrainConfig

C = TypeVar("C", bound=TrainConfig)


def run_command(
    cls: type[C], argv: Sequence[str] | None, *, prog: str, description: str, run: Callable[[Loaded[C]], int]
) -> int:
    """Read a configuration of class `cls` and call `run` with it; returns the exit code.

    An error that the user can act on is one message.

    Args:
        argv: None takes the words of the command line.
    """
    debug = False
    with lasting_console():
        try:
            loaded = load_settings(
                cls, sys.argv[1:] if argv is None else argv, prog=prog, description=description
            )
            debug = loaded.settings.log.level == "debug"
            return run(loaded)
        except TailraceError as error:
            if debug:
                traceback.print_exc()
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code


def prepare(
    config: TrainConfig,
    folder: RunFolder,
    *,
    command: str,
    check_inputs: Callable[[], None],
    private: bool = False,
) -> Path:
    """Check, clean and create the run folder; returns the folder of the new attempt, in which `COMMAND.toml`
    is what it was started with. The caller holds the lock.

    Args:
        command: name of the command that runs `config`.
        check_inputs: refuses what cannot work, before `clean` deletes a run.
        private: whether `config` holds a key.

    Raises:
        RunFolderError: the folder cannot be used.
    """
    run_folder.check_usable(folder, resume=config.resume is not None, clean=config.clean)
    run_folder.check_writable(folder)
    # First of all, because from the lock on this attempt can be asked for something.
    control.clear(folder)
    check_inputs()
    store.check_usable(folder, resume=config.resume is not None, clean=config.clean)
    if config.clean:
        # The store first: a run that is cleaned by half still has its folder here.
        store.clean_steps(folder)
        foreign = run_folder.clean_run(folder)
        if foreign:
            note(f"kept by --clean, not written by a run: {', '.join(map(str, foreign))}")
    folder.paused.unlink(missing_ok=True)
    run_folder.write_config(folder, resolved(config, command), f"{command}.toml", private=private)
    attempt = run_folder.new_attempt(folder)
    text = to_toml(config, header="What this attempt was started with.")
    run_folder.write_text(attempt / f"{command}.toml", text, private=private)
    return attempt


def resolved(config: TrainConfig, command: str) -> str:
    """The configuration as a file that can be run again."""
    # `clean` and `resume` are acts of one command, not properties of the run: read back, they would delete or
    # leave behind what was trained since.
    return to_toml(
        config.model_copy(update={"clean": False, "resume": None}),
        header=f"Resolved configuration; run it with `{command} @ THIS_FILE`.",
    )


def check_model_and_store(config: TrainConfig) -> Path | None:
    """Refuse a local model that is not there, and a store that cannot be reached from here.

    Returns:
        The model as a folder or GGUF file on this machine; None if it is one of the Hub.

    Raises:
        ModelError: there is no such file or folder, or it is no model.
        CheckpointError: the package that the store of `ckpt.url` needs is not installed.
    """
    if config.checkpoint_url is not None:
        check_installed(StoreFolder(config.checkpoint_url).scheme)
    return find_local(config.model)


def check_seq_len(path: Path | None, name: str, seq_len: int) -> None:
    """Refuse samples that are longer than a local model can take, before anything is started.

    Args:
        path: what `check_model_and_store` returned for the model `name`.

    Raises:
        ConfigError: they are. What cannot be known here is found by whoever loads the model.
    """
    if path is None or path.suffix == ".gguf":
        return
    try:
        described: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        longest = {**described, **described.get("text_config", {})}.get("max_position_embeddings")
    except (OSError, ValueError, TypeError, AttributeError):
        return
    if isinstance(longest, int) and seq_len > longest:
        raise ConfigError(
            f"seq_len = {seq_len}, but model.name = {name!r} was made for sequences of at most "
            f"{longest} tokens; lower seq_len"
        )


def dry_run_prefix(config: TrainConfig, folder: RunFolder, check_inputs: Callable[[], None]) -> str:
    """Say what a real run would be refused for; returns what the names of resolved configurations begin with:
    those in the folder of a run are that run's.
    """
    prefix = ""
    try:
        run_folder.check_usable(folder, resume=False, clean=False)
    except RunFolderError as error:
        prefix = "dry_run"
        if config.resume is None and not config.clean:
            note(f"without --dry-run this would be refused: {error}")
    try:
        check_inputs()
    except TailraceError as error:
        # A configuration may be written on one machine for another.
        note(f"on this machine it would be refused: {error}")
    return prefix


def note(text: str) -> None:
    """Tell the user something that is no error."""
    print(f"note: {text}", file=sys.stderr, flush=True)
