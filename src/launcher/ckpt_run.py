"""What the command `ckpt` does: list, verify, export and remove the checkpoints of a run, and (see `control`)
ask a running one to pause or save.

Reads and changes files only; needs no process group and, but for `export`, no torch.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from contract.commit import inspect_step, remove_step, resolve_step, scan, scan_superseded, verify
from contract.errors import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, CheckpointError, TailraceError
from contract.layout import RunFolder
from contract.record import RECORD_NAME, StepEntry, is_step_name
from contract.settings.text import NONE
from contract.store import Folder, StoreFolder, parse_folder
from launcher import control

_STEP_FOLDER = re.compile(r"step_[0-9]+(\.partial)?")
_PLACE = "run folder, its checkpoints folder, or (where one step is meant) a step folder; or its s3:// URL"


def run(argv: Sequence[str] | None = None) -> int:
    """All of the command; returns the exit code. `argv` None takes the words of the command line."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except TailraceError as error:
        print(f"ckpt: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"ckpt: error: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return EXIT_FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt",
        description="List, verify, export and remove the checkpoints of a run; pause or save a running one.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ls = commands.add_parser(
        "ls", help="list all steps", description="List every step, and why it cannot be loaded."
    )
    ls.add_argument("path", help=_PLACE)
    ls.set_defaults(run=_ls)

    check = commands.add_parser(
        "verify",
        help="compare every file with its checksum",
        description="Read every file of every committed step (or of one) again and compare its checksum. "
        "Steps that were never committed are told, and are no failure. Exit code 1 if anything is damaged.",
    )
    check.add_argument("path", help=_PLACE)
    check.add_argument("--step", type=int, help="only this step")
    check.set_defaults(run=_verify)

    export = commands.add_parser(
        "export",
        help="write the weights of a step in Hugging Face format",
        description="Write the weights of a committed step in Hugging Face format, on one CPU process. The "
        "model that was trained must be found where the configuration stored in the step says.",
    )
    export.add_argument("path", help=_PLACE)
    export.add_argument("--step", type=int, help="step; the latest if not given")
    export.add_argument(
        "--out", type=Path, help="folder to write; weights/step_N in the run folder if not given"
    )
    export.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of the weights; auto is that of the source model (default)",
    )
    export.add_argument(
        "--max-shard-size", default="5GB", help="largest file before weights are split (default 5GB)"
    )
    export.add_argument("--force", action="store_true", help="replace an export that is there already")
    export.set_defaults(run=_export)

    _add_rm(commands)
    control.add_commands(commands)
    return parser


def _add_rm(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    rm = commands.add_parser(
        "rm",
        help="delete steps",
        description="Delete steps. The only committed step is kept unless --force is given.",
    )
    rm.add_argument("path", help="run folder or its checkpoints folder; or its s3:// URL")
    what = rm.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, nargs="+", help="steps to delete, committed or not")
    what.add_argument(
        "--superseded",
        action="store_true",
        help="delete what a run left when it went on from an earlier step",
    )
    rm.add_argument("--force", action="store_true", help="delete even the last step that could be loaded")
    rm.set_defaults(run=_rm)


def _ls(arguments: argparse.Namespace) -> int:
    path = parse_folder(arguments.path)
    entries = _entries(path)
    superseded = [] if _is_step(path) else scan_superseded(_checkpoints(path))
    rows = [("STEP", "SIZE", "FILES", "CREATED", "RANKS", "STATUS")]
    for entry in [*entries, *superseded]:
        record = entry.record
        status = entry.state if entry.problem is None else f"{entry.state}: {entry.problem}"
        if entry in superseded:
            status = f"superseded, in {entry.path}"
        size = files = created = ranks = ""
        if record is not None:
            size, files = _format_bytes(record.num_bytes), str(len(record.files))
            created, ranks = record.created, str(record.world_size)
        rows.append((str(entry.step), size, files, created, ranks, status))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row[:5], widths, strict=True)), row[5]]))
    return EXIT_OK


def _verify(arguments: argparse.Namespace) -> int:
    entries = _entries(parse_folder(arguments.path))
    if arguments.step is not None:
        entries = _of_step(entries, arguments.step, arguments.path)
    failed = False
    for entry in entries:
        name = entry.path.name
        if entry.state == "uncommitted" and arguments.step is None and len(entries) > 1:
            print(f"{name}: not committed ({entry.problem})")
            continue
        problems = verify(entry.path)
        for problem in problems:
            print(f"{name}: {problem}")
        failed = failed or bool(problems)
        if not problems and entry.record is not None:
            unchecked = sum(file.checksum is None for file in entry.record.files.values())
            note = f", {unchecked} without a checksum: only their size was compared" if unchecked else ""
            print(
                f"{name}: ok ({len(entry.record.files)} files, {_format_bytes(entry.record.num_bytes)}{note})"
            )
    return EXIT_FAILURE if failed else EXIT_OK


def _export(arguments: argparse.Namespace) -> int:
    path = parse_folder(arguments.path)
    entry = _choose(path, arguments.step)
    target: Path = arguments.out or _default_target(path, entry)
    if target.exists() and not arguments.force:
        print(
            f"ckpt: error: {target} exists; choose another --out, or --force to replace it", file=sys.stderr
        )
        return EXIT_USAGE
    problems = verify(entry.path)
    if problems:
        raise CheckpointError(f"{entry.path} is damaged and is not exported: {'; '.join(problems)}")

    from pydantic import ValidationError

    from contract.model_files import load_tokenizer, resolve_model
    from trainer.checkpoint.reader import read_config, read_tensors
    from trainer.config.model import ModelConfig
    from trainer.model.export import export_weights

    stored = read_config(entry.path).get("model")
    if stored is None:
        raise CheckpointError(
            f"{entry.path} stores no configuration of the model, so its architecture is not known"
        )
    try:
        config = ModelConfig.model_validate(stored)
    except ValidationError as error:
        raise CheckpointError(
            f"{entry.path} stores a model configuration of another version: {error}"
        ) from error
    source = resolve_model(config)
    export_weights(
        read_tensors(entry.path, "model"),
        source.folder,
        target,
        tokenizer=load_tokenizer(config, source),
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        trust_remote_code=config.trust_remote_code,
    )
    print(f"step {entry.step} exported to {target}")
    return EXIT_OK


def _rm(arguments: argparse.Namespace) -> int:
    if arguments.superseded:
        return _rm_superseded(_checkpoints(parse_folder(arguments.path)))
    entries = _entries(parse_folder(arguments.path))
    doomed = [
        entry for step in dict.fromkeys(arguments.step) for entry in _of_step(entries, step, arguments.path)
    ]
    committed = [entry for entry in entries if entry.state == "committed"]
    kept = [entry for entry in committed if entry not in doomed]
    if committed and not kept and not arguments.force:
        raise CheckpointError(
            f"after this, {arguments.path} would hold no step that can be loaded; add --force if you mean it"
        )
    for entry in doomed:
        remove_step(entry.path)
        print(f"removed {entry.path}")
    return EXIT_OK


def _rm_superseded(checkpoints: Folder) -> int:
    for entry in scan_superseded(checkpoints):
        remove_step(entry.path)
        print(f"removed {entry.path}")
    return EXIT_OK


def _entries(path: Folder) -> list[StepEntry]:
    """The steps at `path`: all of a run or checkpoints folder, or the one of a step folder."""
    if isinstance(path, Path) and not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder")
    if _is_step(path):
        return [inspect_step(path)]
    entries = scan(_checkpoints(path))
    if not entries:
        raise CheckpointError(f"{path} holds no checkpoints; name a {_PLACE}")
    return entries


def _of_step(entries: Sequence[StepEntry], step: int, path: Folder | str) -> list[StepEntry]:
    found = [entry for entry in entries if entry.step == step]
    if not found:
        there = ", ".join(dict.fromkeys(str(entry.step) for entry in entries))
        raise CheckpointError(f"there is no step {step} in {path}; there are: {there}")
    return found


def _choose(path: Folder, step: int | None) -> StepEntry:
    if _is_step(path):
        entry = inspect_step(path)
        if step not in (None, entry.step):
            raise CheckpointError(
                f"{path} is step {entry.step}, and --step asks for {step}; leave one of them out"
            )
        if entry.problem is not None:
            raise CheckpointError(f"{path} cannot be exported: {entry.problem}")
        return entry
    _entries(path)
    resolved = resolve_step(_checkpoints(path), step, components=("trainer",))
    assert resolved is not None
    for warning in resolved.warnings:
        print(f"ckpt: warning: {warning}", file=sys.stderr)
    return resolved.entry


def _is_step(path: Folder) -> bool:
    if isinstance(path, StoreFolder):
        return is_step_name(path.name, in_store=True) or path.holds(RECORD_NAME)
    return path.is_dir() and (
        bool(_STEP_FOLDER.fullmatch(path.resolve().name)) or (path / RECORD_NAME).is_file()
    )


def _checkpoints(path: Folder) -> Folder:
    """The checkpoints folder that `path` is or means: that of a run may lie in a store."""
    if isinstance(path, StoreFolder):
        is_run = path.name != "checkpoints" and (path / "checkpoints").is_dir()
        return path / "checkpoints" if is_run else path
    store = _store_of_run(path)
    if store is not None:
        return store
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _store_of_run(path: Path) -> StoreFolder | None:
    """Where the run in the folder `path` keeps its checkpoints, by its own configuration; None if there."""
    config = None
    for name in ("sft.toml", "trainer.toml"):  # of either kind of run
        file = path / "config" / name
        try:
            config = tomllib.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except ValueError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    if config is None:
        return None
    section = config.get("ckpt", NONE)
    url = NONE if section == NONE else section.get("url", NONE)
    return None if url == NONE else RunFolder.of_run(path.parent, config["run_name"], url).store


def _default_target(path: Folder, entry: StepEntry) -> Path:
    if isinstance(path, Path) and isinstance(entry.path, StoreFolder):
        return path / "weights" / f"step_{entry.step}"  # of a run whose folder is here
    checkpoints = entry.path.resolve().parent
    if checkpoints.name != "checkpoints" or isinstance(checkpoints, StoreFolder):
        raise CheckpointError(
            f"{entry.path} lies in no run folder, so the export has no place; give --out DIR"
        )
    return checkpoints.parent / "weights" / f"step_{entry.step}"


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
