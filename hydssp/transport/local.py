"""The transport inside one process: stepped and deterministic, for tests and for one machine without MPI.

Numpy only; imports no MPI, starts no thread, reads no clock but the one it is given. Same contract as
``rma``: the same ring, tags and retries over an ordinary array, with queues for the messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hydssp.transport.ends import RingReader, ServerEnd
from hydssp.transport.ring import DEFAULT_SLOTS, MAX_CHUNK_BYTES, RingWriter, WindowLayout, chunks


class LocalFabric:
    """One server end and its worker ends in one process. Nothing happens but by their calls."""

    def __init__(
        self,
        num_workers: int,
        numel: int,
        dtype: Any = np.float32,
        slots: int = DEFAULT_SLOTS,
        *,
        clock: Callable[[], float],
        chunk_bytes: int = MAX_CHUNK_BYTES,
        num_buffers: int = 0,
        pull_dtype: Any = None,
        push_dtype: Any = None,
    ) -> None:
        """Make both kinds of end.

        Args:
            num_workers: At least 1.
            numel: Elements of the weight vector.
            dtype: float32 or float64.
            slots: Versions in the ring, at least 3.
            clock: Monotonic seconds: the clock of all ends, which count from this call.
            chunk_bytes: Largest piece of ``pull_steps``.
            num_buffers: Elements of each worker's buffers.
            pull_dtype: Elements of the weights as they travel; None: ``dtype``.
            push_dtype: The same for gradients.

        Raises:
            UserError: When a value is not allowed.
        """
        layout = WindowLayout(num_workers, numel, np.dtype(dtype), slots, num_buffers, pull_dtype, push_dtype)
        memory = np.zeros(layout.total_bytes, np.uint8)
        began_at = clock()

        def now() -> float:
            return clock() - began_at

        clocks: deque[tuple[int, np.ndarray]] = deque()
        grants: list[deque[np.ndarray]] = [deque() for _ in range(num_workers)]
        self.server = LocalServer(layout, memory, clocks, grants, now)
        self.workers = [
            LocalWorker(worker, layout, memory, clocks, grants[worker], now, chunk_bytes)
            for worker in range(num_workers)
        ]


class LocalServer(ServerEnd):
    """The server's end of a ``LocalFabric``."""

    def __init__(
        self,
        layout: WindowLayout,
        memory: np.ndarray,
        clocks: deque[tuple[int, np.ndarray]],
        grants: list[deque[np.ndarray]],
        now: Callable[[], float],
    ) -> None:
        """Made by ``LocalFabric``, which owns the queues."""
        self._now = now
        self._clocks = clocks
        self._grants = grants
        ring = RingWriter(layout, memory, self._sync)
        super().__init__(layout, ring, layout.gradients(memory), layout.buffers(memory), clocks_agree=True)

    def now(self) -> float:
        """Seconds since the fabric was made."""
        return self._now()

    def progress(self) -> None:
        """Nothing to do: puts and gets are plain copies."""
        self._require_open()

    def close(self) -> None:
        """Drop the memory; idempotent. The other ends close by themselves."""
        if self._is_open:
            self._drop()

    def _sync(self) -> None:
        """One thread: nothing to order."""

    def _next_clock(self, record: np.ndarray) -> int | None:
        if not self._clocks:
            return None
        worker, record[:] = self._clocks.popleft()
        return worker

    def _send_grant(self, worker: int, record: np.ndarray) -> None:
        self._grants[worker].append(record.copy())


class LocalWorker(RingReader):
    """A worker's end of a ``LocalFabric``."""

    def __init__(
        self,
        worker: int,
        layout: WindowLayout,
        memory: np.ndarray,
        clocks: deque[tuple[int, np.ndarray]],
        grants: deque[np.ndarray],
        now: Callable[[], float],
        chunk_bytes: int,
    ) -> None:
        """Made by ``LocalFabric``, which owns memory and queues."""
        super().__init__(worker, layout, chunk_bytes)
        self._memory: np.ndarray | None = memory
        self._clocks = clocks
        self._grants = grants
        self._now = now

    def now(self) -> float:
        """Seconds since the fabric was made: the server's clock."""
        return self._now()

    def read_weights(self, slot: int, start: int, stop: int, out: np.ndarray) -> None:
        """Copy a piece of a slot."""
        assert self._memory is not None
        out[start:stop] = self._layout.weights(self._memory, slot)[start:stop]

    def read_tag(self, slot: int) -> int:
        """The version in ``slot``."""
        return self._word(self._layout.tag_offset(slot))

    def read_latest(self) -> int:
        """The newest published version."""
        return self._word(self._layout.latest_offset)

    def close(self) -> None:
        """Drop the memory; idempotent. The other ends close by themselves."""
        self._is_open = False
        self._memory = None

    def _put(self, gradient: np.ndarray | None, buffers: np.ndarray | None) -> None:
        assert self._memory is not None
        if gradient is not None:
            slot = self._layout.gradient(self._memory, self.worker)
            for start, stop in chunks(self.numel, self._chunk_bytes // slot.itemsize):
                slot[start:stop] = gradient[start:stop]
        if buffers is not None:
            self._layout.buffers(self._memory)[self.worker][:] = buffers

    def _next_grant(self, record: np.ndarray) -> bool:
        if not self._grants:
            return False
        record[:] = self._grants.popleft()
        return True

    def _send_clock(self, record: np.ndarray) -> None:
        self._clocks.append((self.worker, record.copy()))

    def _word(self, offset: int) -> int:
        assert self._memory is not None
        return int(self._layout.words(self._memory, offset, 1)[0])
