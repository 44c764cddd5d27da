"""New weights from a folder of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from contract.errors import PublishError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the folder under its name, on the host, file by file.

    Raises:
        PublishError: a file is missing or damaged, or does not hold what the index says.
    """
    for path, expected in _files(folder).items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                names = set(file.keys())
                if expected is not None and names != expected:
                    wrong = min(names ^ expected)
                    raise PublishError(
                        f"{path} does not hold what {_INDEX} says: {wrong} is in one of them only"
                    )
                for name in sorted(names):
                    yield name, file.get_tensor(name)
        except PublishError:
            raise
        except FileNotFoundError as error:
            raise PublishError(f"{path} is missing; this machine must see the run folder") from error
        except Exception as error:  # safetensors raises its own type for damaged files
            raise PublishError(f"{path} cannot be read: {error}") from error


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Files of the folder, and the names that each must hold where an index says so."""
    index = folder / _INDEX
    if not index.is_file():
        return {folder / _WEIGHTS: None}
    try:
        by_name = json.loads(index.read_text())["weight_map"]
        files: dict[Path, set[str] | None] = {}
        for name, file in by_name.items():
            names = files.setdefault(folder / file, set())
            assert names is not None
            names.add(name)
        return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PublishError(f"{index} is damaged ({type(error).__name__}: {error})") from error
