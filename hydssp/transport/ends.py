"""The rules of the two ends that every transport keeps, however the bytes travel.

Who may grant and push when, which versions may be read, order and times of the messages. Numpy only; imports
no MPI, reads no clock but its own ``now``. A transport derives from both classes and adds how a record or a
vector gets across.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from operator import attrgetter
from typing import Protocol

import numpy as np

from hydssp.transport.messages import (
    CLOCK_DTYPE,
    GRANT_DTYPE,
    Clock,
    Grant,
    Pushed,
    Stamps,
    read_clock,
    read_grant,
    write_clock,
    write_grant,
)
from hydssp.transport.offset import ClockOffset
from hydssp.transport.protocol import ServerTransport, WorkerTransport
from hydssp.transport.ring import (
    BUFFERS_DTYPE,
    MAX_CHUNK_BYTES,
    NOT_PUBLISHED,
    WindowLayout,
    read_version,
)


class Versions(Protocol):
    """Where the server writes the versions that workers read; ``ServerEnd`` sees to their order."""

    def begin(self, version: int) -> np.ndarray:
        """Memory for ``version``, which nobody reads before ``end``."""

    def end(self, version: int) -> None:
        """``version`` is written completely: readers may have it from now on."""


class ServerEnd(ServerTransport):
    """The server's rules over the memory that a transport gives it."""

    def __init__(
        self,
        layout: WindowLayout,
        versions: Versions,
        gradients: list[np.ndarray],
        buffers: list[np.ndarray],
        *,
        clocks_agree: bool,
    ) -> None:
        """Start with nothing published and every worker waiting for its first grant.

        Args:
            layout: What the numbers and sizes are.
            versions: Of the weights.
            gradients: One slot per worker, ``layout.numel`` elements of ``layout.gradient_dtype``.
            buffers: One slot per worker, ``layout.num_buffers`` float64; set to zero.
            clocks_agree: The workers' ``now`` is the server's, so that nothing is to be estimated.
        """
        self.num_workers = layout.num_workers
        self.numel = layout.numel
        self.num_buffers = layout.num_buffers
        self._is_open = True
        self._versions = versions
        self._latest = NOT_PUBLISHED
        self._open_version: int | None = None
        self._gradients = gradients
        self._buffers = buffers
        for slot in buffers:
            slot[:] = 0.0
        self._is_waiting = [True] * layout.num_workers
        self._clocks_agree = clocks_agree
        self._offsets = [ClockOffset() for _ in range(layout.num_workers)]
        self._clock_record = np.zeros(1, CLOCK_DTYPE)
        self._grant_record = np.zeros(1, GRANT_DTYPE)

    @abstractmethod
    def _sync(self) -> None:
        """Memory barrier between this process and all who read or write the server's memory."""

    @abstractmethod
    def _next_clock(self, record: np.ndarray) -> int | None:
        """Copy one clock message that has arrived into ``record``: its worker, or None if there is none."""

    @abstractmethod
    def _send_grant(self, worker: int, record: np.ndarray) -> None:
        """Send ``record``, which is reused on return, without blocking."""

    def begin_publish(self, version: int) -> np.ndarray:
        """Open ``version`` for writing; see the protocol.

        Raises:
            RuntimeError: When ``version`` is not the next one, another is still open, or the transport is
            closed.
        """
        self._require_open()
        if self._open_version is not None:
            raise RuntimeError(
                f"begin_publish({version}) while version {self._open_version} is still being written"
            )
        if version != self._latest + 1:
            raise RuntimeError(f"begin_publish({version}): the next version is {self._latest + 1}")
        self._open_version = version
        return self._versions.begin(version)

    def end_publish(self) -> None:
        """Make the version that ``begin_publish`` opened the newest.

        Raises:
            RuntimeError: When none is open, or the transport is closed.
        """
        self._require_open()
        if self._open_version is None:
            raise RuntimeError("end_publish without begin_publish")
        self._versions.end(self._open_version)
        self._latest, self._open_version = self._open_version, None

    def gradient(self, worker: int) -> np.ndarray:
        """The gradient slot of ``worker``; see the protocol.

        Raises:
            RuntimeError: When the transport is closed.
        """
        self._require_open()
        return self._gradients[worker]

    def buffers(self, worker: int) -> np.ndarray:
        """The buffers slot of ``worker``; see the protocol.

        Raises:
            RuntimeError: When the transport is closed.
        """
        self._require_open()
        return self._buffers[worker]

    def receive(self) -> list[Pushed]:
        """All clock messages that have arrived, in worker order; see the protocol.

        Raises:
            RuntimeError: When the transport is closed.
        """
        self._require_open()
        pushes = []
        while (worker := self._next_clock(self._clock_record)) is not None:
            received_at = self.now()
            clock, stamps = read_clock(self._clock_record)
            offset = self._offsets[worker]
            if not self._clocks_agree:
                # grant out, clock back: every iteration is an exchange and refreshes the estimate for free
                offset.observe(stamps.grant_sent_at, stamps.granted_at, stamps.pushed_at, received_at)
            granted_at, pushed_at = offset.to_server(stamps, received_at)
            self._is_waiting[worker] = True
            pushes.append(Pushed(worker, clock, granted_at, pushed_at, received_at))
        if pushes:
            self._sync()  # the messages came after the puts: from here on loads see what was put
            pushes.sort(key=attrgetter("worker"))
        return pushes

    def grant(self, worker: int, grant: Grant) -> None:
        """Send ``grant``; see the protocol.

        Raises:
            RuntimeError: When the worker has a grant already (its push was not received since), when the
            version is
                not published, or when the transport is closed.
        """
        self._require_open()
        if not self._is_waiting[worker]:
            raise RuntimeError(f"worker {worker} has a grant already: its push has not been received since")
        # A reader trusts that a granted version was published before it was granted (ring.py).
        if not grant.stop and not 0 <= grant.version <= self._latest:
            raise RuntimeError(
                f"grant of version {grant.version}: the newest published one is {self._latest}"
            )
        self._is_waiting[worker] = False
        write_grant(self._grant_record, grant, self.now())
        self._send_grant(worker, self._grant_record)

    def _require_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("the transport is closed")

    def _drop(self) -> None:
        """Forget every view of the memory, which is about to go."""
        self._is_open = False
        del self._versions, self._gradients, self._buffers


class WorkerEnd(WorkerTransport):
    """A worker's rules; how it reads a version and writes into its slots is the transport's business."""

    def __init__(self, worker: int, layout: WindowLayout, chunk_bytes: int = MAX_CHUNK_BYTES) -> None:
        """Start without a grant.

        Args:
            worker: Number of this worker, from 0.
            layout: Of the server's memory.
            chunk_bytes: Largest piece that travels at once, at least one element.
        """
        self.worker = worker
        self.numel = layout.numel
        self.num_buffers = layout.num_buffers
        self._layout = layout
        self._chunk_bytes = chunk_bytes
        self._max_elements = chunk_bytes // layout.weights_dtype.itemsize
        self._is_open = True
        self._grant: Grant | None = None
        self._granted_at = 0.0
        self._grant_sent_at = 0.0
        self._published = NOT_PUBLISHED  # newest version that this worker knows to be published
        self._clock_record = np.zeros(1, CLOCK_DTYPE)
        self._grant_record = np.zeros(1, GRANT_DTYPE)

    @abstractmethod
    def _read(self, out: np.ndarray, version: int) -> Generator[None, None, tuple[int, int]]:
        """Copy one whole version into ``out``, a step per piece.

        Args:
            out: 1-D, all elements of a version.
            version: The one to try first; it need not be published.

        Returns:
            The version really read, and how often the read had to begin again.

        Raises:
            RuntimeError: When nothing is published yet, or the read never succeeds.
        """

    @abstractmethod
    def _put(self, gradient: np.ndarray | None, buffers: np.ndarray | None) -> None:
        """Copy what is not None into this worker's slots; the clock message that follows tells of it."""

    @abstractmethod
    def _next_grant(self, record: np.ndarray) -> bool:
        """Copy the grant that has arrived into ``record``; False if there is none."""

    @abstractmethod
    def _send_clock(self, record: np.ndarray) -> None:
        """Send ``record``, which is reused on return."""

    def poll_grant(self) -> Grant | None:
        """The next grant if it has arrived; see the protocol.

        Raises:
            RuntimeError: When the transport is closed.
        """
        self._require_open()
        if not self._next_grant(self._grant_record):
            return None
        self._granted_at = self.now()
        grant, self._grant_sent_at = read_grant(self._grant_record)
        if not grant.stop:
            self._grant = grant
            self._published = max(self._published, grant.version)
        return grant

    def pull(self, out: np.ndarray, version: int) -> tuple[int, int]:
        """Copy a whole published version into ``out``; see the protocol.

        Raises:
            ValueError: When ``out`` has the wrong shape, dtype or stride, or ``version`` is negative.
            RuntimeError: When nothing is published yet, the ring is too small, or the transport is closed.
        """
        steps = self.pull_steps(out, version)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                read: tuple[int, int] = end.value
                return read

    def pull_steps(self, out: np.ndarray, version: int) -> Generator[None, None, tuple[int, int]]:
        """The same as ``pull``, piece by piece, for a caller that has other things to do in between.

        Yields:
            After every piece of at most ``chunk_bytes``; ``out`` is not to be used before the end.

        Returns:
            As ``pull``.
        """
        self._require_open()
        self._require_vector("out", out, self.numel, self._layout.weights_dtype)
        if version < 0:
            raise ValueError(f"version={version}: versions are numbered from 0")
        version, retries = yield from self._read(out, version)
        self._published = max(self._published, version)
        return version, retries

    def push(self, gradient: np.ndarray | None, clock: Clock, buffers: np.ndarray | None = None) -> None:
        """Put ``gradient`` and ``buffers`` and send ``clock``; see the protocol.

        Raises:
            RuntimeError: When called without a grant, for another iteration than the granted one, or when
                closed.
            ValueError: When an array has the wrong shape, dtype or stride; when there is a gradient although
                ``clock.samples`` is 0, or none although the clock says that it counts; when there is one
                without the buffers that the model has.
        """
        self._require_open()
        if self._grant is None:
            raise RuntimeError(f"worker {self.worker}: push without a grant")
        if clock.iteration != self._grant.iteration:
            raise RuntimeError(
                f"worker {self.worker}: push of iteration {clock.iteration}, granted {self._grant.iteration}"
            )
        # The server applies what lies in the slot when samples > 0 and is_finite: it must be this push's
        # gradient.
        if gradient is None and clock.samples > 0 and clock.is_finite:
            raise ValueError(f"a push of {clock.samples} samples needs a gradient")
        if gradient is not None and clock.samples == 0:
            raise ValueError("a push of 0 samples is empty: give None as its gradient")
        if gradient is not None and buffers is None and self.num_buffers > 0:
            raise ValueError(f"a gradient needs the {self.num_buffers} buffers that belong to it")
        if gradient is not None:
            self._require_vector("gradient", gradient, self.numel, self._layout.gradient_dtype)
        if buffers is not None:
            self._require_vector("buffers", buffers, self.num_buffers, BUFFERS_DTYPE)
        began_at = self.now()
        self._put(gradient, buffers)
        pushed_at = self.now()
        self._grant = None
        stamps = Stamps(self._granted_at, pushed_at, self._grant_sent_at)
        write_clock(self._clock_record, clock, stamps, push_s=pushed_at - began_at)
        self._send_clock(self._clock_record)

    def _require_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("the transport is closed")

    def _require_vector(self, name: str, vector: np.ndarray, numel: int, dtype: np.dtype) -> None:
        if vector.shape != (numel,) or vector.dtype != dtype or not vector.flags.c_contiguous:
            raise ValueError(
                f"{name}: need a contiguous {dtype.name} array of shape ({numel},), "
                f"got {vector.dtype.name} {vector.shape}"
            )


class RingReader(WorkerEnd):
    """The end of a worker that can look into the server's ring (``ring.py``) by itself."""

    @abstractmethod
    def read_weights(self, slot: int, start: int, stop: int, out: np.ndarray) -> None:
        """Copy elements ``[start, stop)`` of ``slot`` to the same place in ``out``; complete on return."""

    @abstractmethod
    def read_tag(self, slot: int) -> int:
        """The version in the ring's ``slot``."""

    @abstractmethod
    def read_latest(self) -> int:
        """The newest published version."""

    def _read(self, out: np.ndarray, version: int) -> Generator[None, None, tuple[int, int]]:
        if version > self._published:
            self._published = self.read_latest()
            if self._published < 0:
                raise RuntimeError("pull before the server has published anything")
            version = min(version, self._published)
        return (yield from read_version(self, self._layout.slots, out, version, self._max_elements))
