"""Published versions whose memory is not written again while somebody still reads it.

Pure bookkeeping over numpy arrays; imports no MPI. For a transport whose server hands the weights out itself,
and so knows who is reading. With one reader per worker at most ``num_workers`` old versions are being read;
one more is the newest, and one more is being written: never more than ``num_workers + 2`` arrays, and nobody
ever waits for one.
"""

from __future__ import annotations

import numpy as np


class Snapshots:
    """The newest version, those that are still being read, and arrays to write the next one into."""

    def __init__(self, numel: int, dtype: np.dtype) -> None:
        """Start with no version; arrays are allocated when they are first needed."""
        self._numel = numel
        self._dtype = dtype
        self._free: list[np.ndarray] = []
        self._arrays: dict[int, np.ndarray] = {}
        self._num_readers: dict[int, int] = {}
        self._newest: int | None = None

    @property
    def num_arrays(self) -> int:
        """Arrays allocated so far."""
        return len(self._arrays) + len(self._free)

    def begin(self, version: int) -> np.ndarray:
        """Memory for ``version``, whose content is stale, until ``end`` makes it the newest."""
        array = self._free.pop() if self._free else np.empty(self._numel, self._dtype)
        self._arrays[version] = array
        self._num_readers[version] = 0
        return array

    def end(self, version: int) -> None:
        """``version`` is written completely and the newest from now on."""
        before, self._newest = self._newest, version
        if before is not None:
            self._drop_unread(before)

    def acquire(self) -> tuple[int, np.ndarray] | None:
        """The newest version and its weights, which stay as they are until ``release``; None before any."""
        if self._newest is None:
            return None
        self._num_readers[self._newest] += 1
        return self._newest, self._arrays[self._newest]

    def release(self, version: int) -> None:
        """A reader that acquired ``version`` is through with it."""
        assert self._num_readers[version] > 0
        self._num_readers[version] -= 1
        self._drop_unread(version)

    def _drop_unread(self, version: int) -> None:
        if version != self._newest and self._num_readers[version] == 0:
            self._free.append(self._arrays.pop(version))
            del self._num_readers[version]
