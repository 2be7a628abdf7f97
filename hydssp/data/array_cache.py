"""Arrays converted once per node and then mapped by all its ranks: where they lie, who writes, who waits.

Knows no data set: the caller says which files the arrays come from and how to read them. An entry is a folder of
``.npy`` files. It is written beside its place and renamed, so that what is there is whole; the lock only saves work.
Standard library and numpy only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hydssp.errors import UserError

FORMAT = 1
"""Part of every key; another number makes all old entries unknown."""
FOLDER = "hydssp-cache"
FACTS = "facts.json"
PATIENCE_S = 300.0
"""How long a rank waits for another that converts before it does the work itself."""
_PAUSE_S = 0.05

Arrays = dict[str, np.ndarray]
Facts = dict[str, Any]


class Place(NamedTuple):
    """A folder for entries."""

    path: Path
    is_private: bool = False
    """In a folder that everyone may write to: used only if it is our own."""


class Content(NamedTuple):
    """What an entry holds."""

    arrays: Arrays
    """By name; memory maps that cannot be written to."""
    facts: Facts
    """What the reader noted about the source, e.g. checksums."""
    folder: Path


@dataclass(frozen=True)
class ArrayCache:
    """The entry for one version of some source files.

    Attributes:
        name: What is kept, for the name of its folder.
        source: Folder of the source files.
        files: Their names. Their sizes and times of change are part of the key, so that changed files get a new
            entry; old ones are left where they are, because running jobs may have them mapped.
        cache: The folder to keep it in; None: beside the source if that can be written to, else a private folder in
            ``$TMPDIR``.
    """

    name: str
    source: Path
    files: Sequence[str]
    cache: str | Path | None = None

    @property
    def places(self) -> list[Place]:
        """Where entries may lie, in order of preference."""
        if self.cache is not None:
            return [Place(Path(str(self.cache)).expanduser())]
        return [
            Place(self.source / FOLDER),
            Place(Path(tempfile.gettempdir()) / f"hydssp-{os.getuid()}", is_private=True),
        ]

    @property
    def entry(self) -> str:
        """Name of the folder of the entry, in whatever place."""
        stats = [
            (file, s.st_size, s.st_mtime_ns) for file in self.files for s in [os.stat(self.source / file)]
        ]
        key = json.dumps([FORMAT, self.name, str(self.source.resolve()), stats])
        return f"{self.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def find(self) -> Content | None:
        """The entry, if it is in one of the places.

        Raises:
            UserError: When it is there but damaged.
        """
        for place in self.places:
            folder = place.path / self.entry
            if folder.is_dir() and (not place.is_private or _is_ours(place.path)):
                return _open(folder)
        return None

    def fetch(self, make: Callable[[], tuple[Mapping[str, np.ndarray], Facts]]) -> Content:
        """The entry; made first, by one process of those that ask, if it is nowhere.

        Args:
            make: Reads the source: arrays by name, and facts that can be written as JSON. Its own errors pass
                through; it must turn an OSError into something else.

        Raises:
            UserError: When it is in none of the places and none can be written to, or when it is damaged.
        """
        found = self.find()
        if found is not None:
            return found
        faults = []
        for place in self.places:
            folder = place.path / self.entry
            try:
                _make_place(place)
                with _lock(place.path / f".{folder.name}.lock") as is_alone:
                    if is_alone:
                        _remove_parts(folder)
                    if not folder.is_dir():
                        _write(folder, *make())
            except OSError as error:
                faults.append(f"  {place.path}: {error.strerror or error}")
                continue
            return _open(folder)
        raise UserError(
            f"data: {self.name} is converted once into files that all ranks map, but none of the folders for them can"
            " be written to:\n"
            + "\n".join(faults)
            + "\nSet data.cache=FOLDER to a folder with enough room, on the node or shared"
        )


def _make_place(place: Place) -> None:
    place.path.mkdir(mode=0o700 if place.is_private else 0o777, parents=not place.is_private, exist_ok=True)
    if place.is_private and not _is_ours(place.path):
        raise PermissionError(errno.EPERM, "belongs to another user, or others may write to it")


def _is_ours(path: Path) -> bool:
    """Whether nobody else can have put something there; a link in a shared folder could lead anywhere."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock at ``path``; yields False when it could not be had and the work is done nevertheless.

    The kernel takes the lock from a holder that dies. A file system without locks, or a holder that hangs, only
    costs that the work is done twice.
    """
    with path.open("a") as file:
        deadline = time.monotonic() + PATIENCE_S
        is_alone = False
        while not is_alone:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alone = True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE_S)
            except OSError:
                break
        yield is_alone


def _remove_parts(folder: Path) -> None:
    """Remove what a process that died in the middle has left; only with the lock."""
    for part in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(part, ignore_errors=True)


def _write(folder: Path, arrays: Mapping[str, np.ndarray], facts: Facts) -> None:
    part = folder.with_name(f".{folder.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    part.mkdir()
    try:
        for name, array in arrays.items():
            with (part / f"{name}.npy").open("wb") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        (part / FACTS).write_text(json.dumps({"arrays": [*arrays], **facts}, indent=1) + "\n")
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and its entry is as good
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _open(folder: Path) -> Content:
    try:
        facts = json.loads((folder / FACTS).read_text())
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in facts.pop("arrays")}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"data: the cache {folder} is damaged ({type(error).__name__}: {error}); delete this folder, and it is made"
            " anew"
        ) from error
    return Content(arrays, facts, folder)
