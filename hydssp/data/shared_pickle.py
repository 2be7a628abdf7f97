"""Pickles whose large arrays are not in them but in shared memory or in the files that they are mapped from.

One job: hand a data set to several loader processes of one rank without a copy for each. Standard library and numpy
only. The memory has no name, so that it is gone with the last process that has it open.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from typing import Any

import numpy as np

MIN_BYTES = 1 << 16
"""Smaller arrays go into the pickle."""
_ALIGNMENT = 64


def nameless_memory() -> int:
    """A file descriptor of empty memory that other processes can map."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hydssp-loader")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def aligned(offset: int) -> int:
    """The next offset at which an array may begin."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, memory: int) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._memory = memory
        self._seen: dict[int, tuple[Any, Any]] = {}
        """By id: the array, kept so that its id stays its own, and where it is."""

    def persistent_id(self, obj: Any) -> Any:
        # Exact types: a subclass may have a state of its own.
        if type(obj) not in (np.ndarray, np.memmap) or obj.nbytes < MIN_BYTES or obj.dtype.hasobject:
            return None
        if id(obj) in self._seen:
            return self._seen[id(obj)][1]
        place = _place_in_file(obj)
        if place is None:
            place = "", _append(self._memory, np.ascontiguousarray(obj))
        self._seen[id(obj)] = obj, (*place, obj.dtype, obj.shape)
        return self._seen[id(obj)][1]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, memory: int) -> None:
        super().__init__(file)
        self._memory = memory
        self._loaded: dict[Any, np.ndarray] = {}

    def persistent_load(self, pid: Any) -> np.ndarray:
        if pid not in self._loaded:
            self._loaded[pid] = self._map(*pid)
        return self._loaded[pid]

    def _map(self, path: str, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        if path:
            return np.memmap(path, dtype, mode="r", offset=offset, shape=shape)
        # Private, as after a pickle: what one process writes is not seen by the others.
        content = mmap.mmap(self._memory, 0, access=mmap.ACCESS_COPY)
        array: np.ndarray = np.ndarray(shape, dtype, buffer=content, offset=offset)
        return array


def _place_in_file(array: np.ndarray) -> tuple[str, int] | None:
    """Path and offset of an array that is all of, or a contiguous piece of, a file mapped to be shared."""
    if not isinstance(array, np.memmap) or array.filename is None or not array.flags.c_contiguous:
        return None
    content = getattr(array, "_mmap", None)  # None: computed from a map, and no longer in one
    if content is None or array.mode not in ("r", "r+"):
        return None
    mapped_from = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    begin = np.frombuffer(content, np.uint8).__array_interface__["data"][0]
    return os.fspath(array.filename), mapped_from + array.__array_interface__["data"][0] - begin


def _append(memory: int, array: np.ndarray) -> int:
    offset = aligned(os.fstat(memory).st_size)
    with os.fdopen(os.dup(memory), "wb") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(array.data)
    return offset


def dump(obj: Any, memory: int) -> tuple[int, int]:
    """Put ``obj`` into ``memory``, a descriptor from ``nameless_memory``.

    Returns:
        Offset and size of the pickle in it.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, memory).dump(obj)
    content = np.frombuffer(buffer.getbuffer(), np.uint8)
    return _append(memory, content), len(content)


def load(memory: int, offset: int, size: int) -> Any:
    """What ``dump`` has put there; large arrays are mapped."""
    return _Unpickler(io.BytesIO(os.pread(memory, size, offset)), memory).load()
