"""What differs in a store: no renaming, a marker that comes last, and failures of the store itself."""

from __future__ import annotations

import errno
import pickle

import pytest

from contract.commit import folder_to_write, inspect_step, remove_step, resolve_step, scan, scan_superseded
from contract.commit import supersede as supersede_step
from contract.errors import CheckpointError, ConfigError
from contract.store import StoreFolder, check_url, parse_folder, store_errors
from tests.unit.contract.places import FILES, MemoryPlace, record_of


@pytest.fixture
def place() -> MemoryPlace:
    return MemoryPlace()


class NoAnswer(OSError):
    """Stands for what a store's library raises: no number, no text of its own."""


class UnreadableFolder(StoreFolder):
    """A store that lists what it holds and does not answer when it is read."""

    __slots__ = ()

    def __truediv__(self, name: str) -> StoreFolder:
        return UnreadableFolder(f"{self.url}/{name}")

    def read_bytes(self, name: str) -> bytes:
        with store_errors(f"{self.url}/{name}"):
            raise NoAnswer("no answer")


def test_a_superseded_step_leaves_the_list_whole_and_can_still_be_named(place: MemoryPlace) -> None:
    place.write_step(4)
    old = place.write_step(5)
    supersede_step(old)
    resolved = resolve_step(place.store)
    assert resolved is not None and resolved.entry.step == 4
    assert [entry.path for entry in scan_superseded(place.store)] == [old]
    assert inspect_step(old).state == "committed"


def test_a_new_history_writes_beside_a_superseded_step_of_its_number(place: MemoryPlace) -> None:
    first = place.write_step(5)
    supersede_step(first)
    second = place.write_step(5)
    supersede_step(second)
    third = place.write_step(5)
    assert [folder.name for folder in (first, second, third)] == ["step_5", "step_5.2", "step_5.3"]
    assert [entry.path for entry in scan(place.store)] == [third]
    assert [entry.state for entry in scan_superseded(place.store)] == ["committed", "committed"]
    remove_step(third)
    assert scan(place.store) == []
    assert folder_to_write(place.store, 5) == third


def test_a_commit_supersedes_a_committed_step_of_its_number_that_was_still_listed(place: MemoryPlace) -> None:
    first = place.write_step(5)
    second = place.write_step(5)
    assert second != first
    assert [entry.path for entry in scan(place.store)] == [second]
    assert [entry.path for entry in scan_superseded(place.store)] == [first]


def test_the_marker_is_written_last_and_removed_first(place: MemoryPlace) -> None:
    """Each change of the store is followed by a look at what counts then."""
    states: list[str] = []

    class Watched(StoreFolder):
        __slots__ = ()

        def _look(self) -> None:
            states.extend(entry.state for entry in scan(place.store))

        def write_bytes(self, name: str, content: bytes) -> None:
            super().write_bytes(name, content)
            self._look()

        def delete(self, names) -> None:
            super().delete(names)
            self._look()

    folder = Watched((place.store / "step_5").url)
    for name, content in FILES.items():
        folder.write_bytes(name, content)
    place.commit(folder, record_of(5, FILES))
    assert states == ["uncommitted"] * 3 + ["committed"]
    states.clear()
    remove_step(folder)
    assert states == ["uncommitted"]
    assert place.store.sizes() == {}


def test_a_store_that_does_not_answer_makes_no_step_a_damaged_one(place: MemoryPlace) -> None:
    place.write_step(5)
    with pytest.raises(CheckpointError, match=r"step_5/complete\.json cannot be read: no answer"):
        resolve_step(UnreadableFolder(place.store.url))


def test_every_failure_of_a_store_is_an_error_with_a_number_a_text_and_a_place() -> None:
    library_error = type("EndpointError", (Exception,), {"__module__": "botocore.exceptions"})
    for error, expected in (
        (PermissionError("Access Denied"), (errno.EACCES, "Access Denied")),
        (FileNotFoundError("s3://b/c"), (errno.ENOENT, "No such file or directory")),
        (TimeoutError(), (errno.ETIMEDOUT, "TimeoutError")),
        (library_error("no route"), (errno.EIO, "EndpointError: no route")),
    ):
        with pytest.raises(OSError) as caught, store_errors("s3://b/c"):
            raise error
        assert (caught.value.errno, caught.value.strerror, caught.value.filename) == (*expected, "s3://b/c")
    with pytest.raises(TypeError), store_errors("s3://b/c"):
        raise TypeError("a defect stays one")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://host/runs", "valid are URLs that begin with one of s3://, gs://, memory://"),
        ("bucket/runs", "valid are URLs that begin with one of s3://"),
        ("s3://", "names no bucket"),
        ("s3://bucket//runs", "holds an empty name"),
        ("s3://key:secret@bucket/runs", "holds a name or a character"),
        ("s3://bucket/runs?versionId=3", "holds a name or a character"),
        ("s3://bucket/../runs", "holds a name or a character"),
    ],
)
def test_a_url_that_names_no_folder_of_a_known_store_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_url(url)
    assert reason in str(error.value) and url in str(error.value)


def test_a_folder_in_a_store_is_named_like_a_path_and_travels_between_processes() -> None:
    folder = parse_folder("s3://bucket/runs/a/")
    assert isinstance(folder, StoreFolder)
    assert str(folder / "step_4") == "s3://bucket/runs/a/step_4"
    assert ((folder / "step_4").name, (folder / "step_4").parent) == ("step_4", folder)
    assert StoreFolder("s3://bucket").parent == StoreFolder("s3://bucket")
    assert pickle.loads(pickle.dumps(folder)) == folder
