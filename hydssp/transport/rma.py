"""The default transport: MPI one-sided windows for vectors, small messages for clocks and grants.

Knows MPI and numpy, nothing of coordination, Hydra or torch. The server is rank 0 of the communicator, worker
w is rank w + 1. Everything here is collective where it says so; an abort frees nothing.

What this file relies on:

- One window from ``MPI_Win_allocate``, memory on rank 0 alone. Windows over foreign memory
  (``MPI_Win_create``) are slower by orders of magnitude on some libraries.
- One ``MPI_Win_lock_all(MPI_MODE_NOCHECK)`` epoch from start to end on every rank, rank 0 included. A lock
  per operation would need the server's attention each time; within one epoch only the operations travel.
- Put and Get, completed by ``MPI_Win_flush``. Put then flush: complete at the server before the clock message
  is sent. Get then flush: in the reader's memory before the tag is asked for. No accumulate: each gradient
  slot has one writer.
- ``MPI_Win_sync`` on the server orders its own loads and stores against those operations (MPI standard,
  unified memory
  model: between the clock message and the first load of the gradient; around every store of a tag).
- The server enters MPI at least every millisecond or so while workers are active (``receive``, ``progress``):
  some libraries move data only then.
- Element types and pieces of at most 1 GiB, because some libraries refuse counts above 2**31 - 1.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from mpi4py import MPI

from hydssp.errors import UserError
from hydssp.transport.backoff import Backoff, choose_backoff
from hydssp.transport.ends import ServerEnd, WorkerEnd
from hydssp.transport.messages import CLOCK_DTYPE, GRANT_DTYPE
from hydssp.transport.ring import DEFAULT_SLOTS, MAX_CHUNK_BYTES, WindowLayout, chunks

SERVER_RANK = 0
CLOCK_TAG = 1
GRANT_TAG = 2
HELLO_TAG = 3
NUM_HELLOS = 8
"""Exchanges per worker at the start; the tightest one gives the clock offset."""

_ELEMENT_TYPES = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}


def node_backoff(comm: MPI.Intracomm) -> Backoff:
    """A new back-off that suits this rank's node. Collective.

    Counts the ranks of ``comm`` on the node and the cores that they may use together, whatever they are bound
    to.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        cores = set().union(*node.allgather(mine))
        return choose_backoff(node.size, len(cores))
    finally:
        node.Free()


def _wait(request: MPI.Request, backoff: Backoff) -> None:
    """Complete ``request`` without burning a core: MPI's own wait polls flat out."""
    backoff.reset()
    while not request.Test():
        backoff.wait()


class _Window:
    """The window, its epoch and a private communicator: opened and closed by all ranks together."""

    def __init__(self, comm: MPI.Intracomm, numel: int, dtype: Any, slots: int, chunk_bytes: int) -> None:
        # Ranks come in at different times, and the collectives below would poll flat out for the last one.
        _wait(comm.Ibarrier(), Backoff(spin_s=0.0))
        self.backoff = node_backoff(comm)
        self.comm = comm.Dup()
        try:
            self.layout = self._agree(numel, np.dtype(dtype), slots, chunk_bytes)
        except UserError:
            self.comm.Free()  # all ranks raise alike
            raise
        self.element_type = _ELEMENT_TYPES[self.layout.dtype.name]
        is_server = self.comm.rank == SERVER_RANK
        info = MPI.Info.Create([("same_disp_unit", "true"), ("mpi_minimum_memory_alignment", "64")])
        self.win = MPI.Win.Allocate(self.layout.total_bytes if is_server else 0, 1, info, self.comm)
        info.Free()
        self.win.Lock_all(MPI.MODE_NOCHECK)
        # A byte view. It keeps no window alive: after Free it points nowhere, so ``close`` drops it first.
        memory: Any = self.win.tomemory() if is_server else b""
        self.memory = np.frombuffer(memory, np.uint8)
        self.clocks_agree = bool(
            self.comm.bcast(MPI.COMM_WORLD.Get_attr(MPI.WTIME_IS_GLOBAL), root=SERVER_RANK)
        )
        start = MPI.Wtime()
        server_start = self.comm.bcast(start, root=SERVER_RANK)
        self.start = server_start if self.clocks_agree else start

    def _agree(self, numel: int, dtype: np.dtype, slots: int, chunk_bytes: int) -> WindowLayout:
        """The layout, if all ranks mean the same one; otherwise the same error on all."""
        mine = {"numel": numel, "dtype": dtype.name, "transport.slots": slots, "chunk_bytes": chunk_bytes}
        everyone = self.comm.allgather(mine)
        server = everyone[SERVER_RANK]
        for rank, theirs in enumerate(everyone):
            for key, value in theirs.items():
                if value != server[key]:
                    raise UserError(
                        f"{key}: rank {rank} has {value}, the server has {server[key]}. All ranks must "
                        "build the same model from the same configuration and run the same versions of "
                        "hydssp and PyTorch."
                    )
        return WindowLayout(self.comm.size - 1, numel, dtype, slots)

    def ready(self) -> None:
        """Everybody is here and the server's memory is initialised. Collective."""
        _wait(self.comm.Ibarrier(), self.backoff)

    def close(self) -> None:
        """Wait for all, then free window and communicator. Collective."""
        _wait(self.comm.Ibarrier(), self.backoff)
        del self.memory
        self.win.Unlock_all()
        self.win.Free()
        self.comm.Free()


class RmaServer(ServerEnd):
    """Rank 0's end. A ``with`` block closes it, unless it is left by an exception."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        numel: int,
        dtype: Any = np.float32,
        slots: int = DEFAULT_SLOTS,
        chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        """Open together with ``RmaWorker`` on all other ranks, with the same arguments. Collective.

        Args:
            comm: Duplicated; may be used for other things meanwhile.
            numel: Elements of the weight vector.
            dtype: float32 or float64.
            slots: Versions in the ring, at least 3.
            chunk_bytes: Largest piece of one put or get.

        Raises:
            UserError: On every rank, when a value is not allowed or the ranks disagree.
        """
        self._window = _Window(comm, numel, dtype, slots, chunk_bytes)
        window = self._window
        num_workers = window.layout.num_workers
        self._status = MPI.Status()
        self._grants = np.zeros((num_workers, 1), GRANT_DTYPE)  # one per worker: an Isend owns its buffer
        self._grant_requests = [MPI.REQUEST_NULL] * num_workers
        super().__init__(window.layout, window.memory, clocks_agree=window.clocks_agree)
        window.ready()
        if not window.clocks_agree:
            self._greet()

    def now(self) -> float:
        """Seconds since this rank opened the transport."""
        return MPI.Wtime() - self._window.start

    def progress(self) -> None:
        """Enter MPI once."""
        self._require_open()
        self._window.comm.Iprobe(MPI.ANY_SOURCE, CLOCK_TAG)

    def close(self) -> None:
        """Free everything, together with every worker's ``close``. Collective; idempotent."""
        if not self._is_open:
            return
        for request in self._grant_requests:
            _wait(request, self._window.backoff)
        self._drop()
        self._window.close()

    def __enter__(self) -> RmaServer:
        """Itself."""
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Close, unless after an error: the other ranks would not come to a collective call."""
        if kind is None:
            self.close()

    def _greet(self) -> None:
        """Measure every worker's clock: a few exchanges each, as long as nothing else goes on."""
        window = self._window
        word = np.zeros(1, np.float64)
        stamps = np.zeros(2, np.float64)
        for worker, offset in enumerate(self._offsets):
            for _ in range(NUM_HELLOS):
                request = window.comm.Irecv([stamps, MPI.DOUBLE], worker + 1, HELLO_TAG)
                sent = self.now()
                window.comm.Send([word, MPI.DOUBLE], worker + 1, HELLO_TAG)
                _wait(request, window.backoff)
                offset.observe(sent, stamps[0].item(), stamps[1].item(), self.now())

    def _sync(self) -> None:
        self._window.win.Sync()

    def _next_clock(self, record: np.ndarray) -> int | None:
        message = self._window.comm.Improbe(MPI.ANY_SOURCE, CLOCK_TAG, self._status)
        if message is None:
            return None
        message.Recv([record, CLOCK_DTYPE.itemsize, MPI.BYTE])
        return self._status.source - 1

    def _send_grant(self, worker: int, record: np.ndarray) -> None:
        # The worker has pushed since its last grant, so it has received that one: this wait is over at once.
        self._grant_requests[worker].Wait()
        self._grants[worker] = record
        self._grant_requests[worker] = self._window.comm.Isend(
            [self._grants[worker], GRANT_DTYPE.itemsize, MPI.BYTE], worker + 1, GRANT_TAG
        )


class RmaWorker(WorkerEnd):
    """A worker's end. A ``with`` block closes it, unless it is left by an exception."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        numel: int,
        dtype: Any = np.float32,
        slots: int = DEFAULT_SLOTS,
        chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        """Open together with ``RmaServer`` on rank 0, with the same arguments. Collective.

        Args:
            comm: Duplicated; may be used for other things meanwhile.
            numel: Elements of the weight vector.
            dtype: float32 or float64.
            slots: Versions in the ring, at least 3.
            chunk_bytes: Largest piece of one put or get.

        Raises:
            UserError: On every rank, when a value is not allowed or the ranks disagree.
        """
        self._window = _Window(comm, numel, dtype, slots, chunk_bytes)
        window = self._window
        super().__init__(window.comm.rank - 1, window.layout, chunk_bytes)
        self._word = np.zeros(1, np.int64)
        self._incoming = np.zeros(1, GRANT_DTYPE)
        self._is_stopped = False
        window.ready()
        if not window.clocks_agree:
            self._greet()
        self._expect_grant()

    def now(self) -> float:
        """Seconds on this rank's ``MPI_Wtime``, counted from where it opened the transport."""
        return MPI.Wtime() - self._window.start

    def read_weights(self, slot: int, start: int, stop: int, out: np.ndarray) -> None:
        """Get a piece of a slot and complete it."""
        layout = self._window.layout
        offset = layout.weights_offset(slot) + start * layout.dtype.itemsize
        count = stop - start
        kind = self._window.element_type
        self._window.win.Get([out[start:stop], count, kind], SERVER_RANK, (offset, count, kind))
        self._window.win.Flush(SERVER_RANK)  # the data are here before the tag is asked for

    def read_tag(self, slot: int) -> int:
        """The version in ``slot``."""
        return self._read_word(self._window.layout.tag_offset(slot))

    def read_latest(self) -> int:
        """The newest published version."""
        return self._read_word(self._window.layout.latest_offset)

    def close(self) -> None:
        """Free everything, together with the server's ``close``. Collective; idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if not self._is_stopped:  # nothing more will come for the receive that was posted ahead
            self._request.Cancel()
            self._request.Wait()
        self._window.close()

    def __enter__(self) -> RmaWorker:
        """Itself."""
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Close, unless after an error: the other ranks would not come to a collective call."""
        if kind is None:
            self.close()

    def _greet(self) -> None:
        """Answer the server's exchanges with the times of receipt and reply."""
        window = self._window
        word = np.zeros(1, np.float64)
        stamps = np.zeros(2, np.float64)
        for _ in range(NUM_HELLOS):
            request = window.comm.Irecv([word, MPI.DOUBLE], SERVER_RANK, HELLO_TAG)
            _wait(request, window.backoff)
            stamps[0] = self.now()
            stamps[1] = self.now()
            window.comm.Send([stamps, MPI.DOUBLE], SERVER_RANK, HELLO_TAG)

    def _read_word(self, offset: int) -> int:
        self._window.win.Get([self._word, 1, MPI.INT64_T], SERVER_RANK, (offset, 1, MPI.INT64_T))
        self._window.win.Flush(SERVER_RANK)
        return int(self._word[0])

    def _put(self, gradient: np.ndarray) -> None:
        layout = self._window.layout
        kind = self._window.element_type
        base = layout.gradient_offset(self.worker)
        for start, stop in chunks(self.numel, self._max_elements):
            count = stop - start
            offset = base + start * layout.dtype.itemsize
            self._window.win.Put([gradient[start:stop], count, kind], SERVER_RANK, (offset, count, kind))
        self._window.win.Flush(SERVER_RANK)  # complete at the server before the clock message can tell of it

    def _expect_grant(self) -> None:
        self._request = self._window.comm.Irecv(
            [self._incoming, GRANT_DTYPE.itemsize, MPI.BYTE], SERVER_RANK, GRANT_TAG
        )

    def _next_grant(self, record: np.ndarray) -> bool:
        if self._is_stopped or not self._request.Test():
            return False
        record[:] = self._incoming
        self._is_stopped = bool(record["stop"][0])
        if not self._is_stopped:
            self._expect_grant()
        return True

    def _send_clock(self, record: np.ndarray) -> None:
        # Small enough to be sent eagerly: does not wait for the server.
        self._window.comm.Send([record, CLOCK_DTYPE.itemsize, MPI.BYTE], SERVER_RANK, CLOCK_TAG)
