"""What all whole runs share: the warm process, a tiny model and a small data set."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.place import Place, write_model, write_rows
from tests.support.runs import Nursery


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` (with dropout), `still/` (the same without) and `train.jsonl`."""
    folder = tmp_path_factory.mktemp("shared")
    write_model(folder / "model", dropout=0.2)
    write_model(folder / "still", dropout=0.0)
    write_rows(folder / "train.jsonl", 22, seed=1)
    return folder


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The warm process."""
    warm = Nursery(tmp_path_factory.mktemp("output"), tmp_path_factory.mktemp("cache"))
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, shared: Path, nursery: Nursery) -> Path:
    """The folder of a run of 4 steps with the checkpoints 2 and 4 and an export. Copy it; never change it."""
    place = Place(tmp_path_factory.mktemp("finished"), shared, nursery)
    place.train(max_steps=4, ckpt__interval=2, export__dtype="auto")
    return place.folder().root


@pytest.fixture
def run_before(place: Place, finished_run: Path) -> Place:
    """A place whose run `sft` is `finished_run`, with a file of the user's beside it."""
    shutil.copytree(finished_run, place.folder().root, symlinks=True)
    (place.folder().root / "notes.txt").write_text("mine")
    return place


@pytest.fixture
def place(tmp_path: Path, shared: Path, nursery: Nursery) -> Place:
    """A folder of this test's own, in which it runs `sft`."""
    return Place(tmp_path, shared, nursery)
