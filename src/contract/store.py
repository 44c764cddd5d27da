"""Folders in object stores, and what the rules of checkpoints ask of any folder, local or in a store.

A store knows no folders and no renaming: a folder is the common beginning of names, and exists while an
object has it. An object appears whole or not at all. Listings are never taken from a cache. Every failure of
a store is an `OSError` that says what went wrong and where, as with a local file.

Credentials, end points and regions are those that the store's own tools use (environment, configuration
files): none of them stands in a configuration of ours. No torch.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from contract.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<path>.*)")

_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "memory": None}
"""Schemes, and the package and the extra of Tailrace that each needs."""

_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # A request that nobody answers fails after some seconds (refused) to some minutes (silence), all tries
    # together.
    "s3": {
        "config_kwargs": {
            "connect_timeout": 10,
            "read_timeout": 30,
            "retries": {"mode": "standard", "total_max_attempts": 4},
        }
    }
}

_ERRNO: Mapping[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    TimeoutError: errno.ETIMEDOUT,
}

PART_BYTES = 32 << 20
"""Size of the parts in which large objects travel; a store takes at least ten thousand of them."""


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """A folder in an object store, named by its URL (`s3://bucket/runs/a`); opens nothing by itself.

    Used like a path where it matters: `name`, `parent`, `/` and `str()`.
    """

    url: str

    def __post_init__(self) -> None:
        check_url(self.url)
        scheme, path = self.url.split("://", 1)
        object.__setattr__(self, "url", f"{scheme}://{path.strip('/')}")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StoreFolder:
        return StoreFolder(f"{self.url}/{name}")

    @property
    def scheme(self) -> str:
        """`s3`, `gs` or `memory`."""
        return self.url.partition("://")[0]

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StoreFolder:
        """The folder that this one lies in; of a bucket, the bucket itself."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else StoreFolder(above)

    def resolve(self) -> StoreFolder:
        """Itself: a store has no links."""
        return self

    @property
    def filesystem(self) -> AbstractFileSystem:
        """The store, opened once per process.

        Raises:
            CheckpointError: the package that this scheme needs is not installed.
        """
        return _filesystem(self.scheme, os.getpid())

    def sizes(self) -> dict[str, int]:
        """Every object below this folder: its name relative to the folder, and its size in bytes.

        A folder that does not exist is empty, and so is one in a bucket that does not exist.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        filesystem = self.filesystem
        with store_errors(self.url):
            filesystem.invalidate_cache()
            start = f"{filesystem._strip_protocol(self.url)}/"
            found: dict[str, dict[str, Any]] = {}
            with suppress(FileNotFoundError):
                found = cast("dict[str, dict[str, Any]]", filesystem.find(self.url, detail=True))
        # Tools that show a store as folders leave objects whose names end in "/".
        return {
            name.removeprefix(start): int(info["size"])
            for name, info in found.items()
            if name.startswith(start) and not name.endswith("/") and info["type"] == "file"
        }

    def is_dir(self) -> bool:
        """Whether there is any object below it."""
        return bool(self.sizes())

    def holds(self, name: str) -> bool:
        """Whether this object exists.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        filesystem = self.filesystem
        with store_errors(f"{self.url}/{name}"):
            filesystem.invalidate_cache()
            try:
                return filesystem.info(f"{self.url}/{name}")["type"] == "file"
            except FileNotFoundError:
                return False

    def read_bytes(self, name: str) -> bytes:
        """One object, whole.

        Raises:
            OSError: it does not exist or cannot be read.
        """
        with store_errors(f"{self.url}/{name}"):
            return cast("bytes", self.filesystem.cat_file(f"{self.url}/{name}"))

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write one object in one request: afterwards it is there, whole and durable.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        with store_errors(f"{self.url}/{name}"):
            self.filesystem.pipe_file(f"{self.url}/{name}", content)

    def delete(self, names: Sequence[str]) -> None:
        """Delete these objects; one that is gone already is no error.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        if not names:
            return
        with store_errors(self.url), suppress(FileNotFoundError):
            self.filesystem.rm([f"{self.url}/{name}" for name in names])


Folder: TypeAlias = Path | StoreFolder


def check_url(url: str) -> None:
    """Refuse what names no folder of a store that Tailrace knows; asks nothing of the store.

    Raises:
        ConfigError: no URL, another scheme, no bucket, or characters with a meaning of their own.
    """
    match = _URL.fullmatch(url)
    known = ", ".join(f"{scheme}://" for scheme in _PACKAGES)
    if match is None or match["scheme"] not in _PACKAGES:
        raise ConfigError(f"{url!r} names no object store; valid are URLs that begin with one of {known}")
    parts = match["path"].rstrip("/").split("/")
    if not all(parts):
        raise ConfigError(f"{url!r} names no bucket, or holds an empty name; write e.g. s3://bucket/runs")
    if not re.fullmatch(r"[A-Za-z0-9_./+=:-]+", match["path"]) or {".", ".."} & set(parts):
        raise ConfigError(
            f"{url!r} holds a name or a character that URLs or patterns give a meaning of its own; use "
            "letters, digits and - _ . /"
        )


def check_installed(scheme: str) -> None:
    """See that the package of a scheme is there, without opening the store.

    Raises:
        CheckpointError: it is not, or cannot be imported; names what to install.
    """
    import importlib

    if needed := _PACKAGES[scheme]:
        package, extra = needed
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise CheckpointError(
                f"{scheme}:// needs the package {package}, which cannot be imported ({error}); install it "
                f"with `uv sync --extra {extra}` (or `pip install 'tailrace[{extra}]'`)"
            ) from error


def parse_folder(text: str | Path) -> Folder:
    """A path, or a folder in a store where `text` is a URL.

    Raises:
        ConfigError: it is a URL, but not of a store that Tailrace knows.
    """
    text = str(text)
    return StoreFolder(text) if "://" in text else Path(text).expanduser()


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Make every failure inside an `OSError` with a number, a text and `url`.

    The libraries of stores raise classes of their own, and `OSError`s without number or text. Errors of the
    language (a `TypeError`, say) are defects, and pass as they are.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.strerror and error.filename:
            raise
        number = error.errno or next(
            (value for kind, value in _ERRNO.items() if isinstance(error, kind)), errno.EIO
        )
        text = error.strerror or str(error) or type(error).__name__
        if isinstance(error, FileNotFoundError) and text in url:
            text = os.strerror(number)
        raise OSError(number, text, url) from error
    except Exception as error:
        if type(error).__module__ == "builtins":
            raise
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error


def open_binary(folder: Folder, name: str, *, block_bytes: int = PART_BYTES) -> BinaryIO:
    """Open one file for reading, from its beginning to its end.

    Raises:
        OSError: it does not exist or cannot be read.
    """
    if isinstance(folder, Path):
        return cast("BinaryIO", (folder / name).open("rb", buffering=0))
    with store_errors(f"{folder}/{name}"):
        return cast(
            "BinaryIO",
            folder.filesystem.open(f"{folder}/{name}", "rb", block_size=block_bytes, cache_type="readahead"),
        )


def read_bytes(folder: Folder, name: str) -> bytes:
    """One file, whole.

    Raises:
        OSError: it does not exist or cannot be read.
    """
    return (folder / name).read_bytes() if isinstance(folder, Path) else folder.read_bytes(name)


@functools.cache
def _filesystem(scheme: str, process_id: int) -> AbstractFileSystem:
    # By process: the connections and the thread of one do not survive a fork.
    import fsspec

    check_installed(scheme)
    return fsspec.filesystem(
        scheme, skip_instance_cache=True, use_listings_cache=False, **_OPTIONS.get(scheme, {})
    )
