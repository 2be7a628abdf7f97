"""What the MPI transports have in common: a private communicator, one time base, clock and grant messages.

Knows MPI and numpy, nothing of coordination, Hydra or torch. The server is rank 0 of the communicator, worker
w is rank w + 1. How vectors travel is the business of ``rma`` and ``two_sided``. Everything here is collective
where it says so; an abort frees nothing.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from hydssp.errors import UserError
from hydssp.transport.backoff import Backoff, choose_backoff
from hydssp.transport.ends import ServerEnd, Versions, WorkerEnd
from hydssp.transport.messages import CLOCK_DTYPE, GRANT_DTYPE
from hydssp.transport.ring import WindowLayout

SERVER_RANK = 0
CLOCK_TAG = 1
GRANT_TAG = 2
HELLO_TAG = 3
NUM_HELLOS = 8
"""Exchanges per worker at the start; the tightest one gives the clock offset."""
ELEMENT_TYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "float16": MPI.UINT16_T,  # MPI has no 16-bit float, and only moves it
    "uint16": MPI.UINT16_T,
    "int32": MPI.INT32_T,
}

Self = TypeVar("Self", bound="MpiServer | MpiWorker")


def node_backoff(comm: MPI.Intracomm) -> Backoff:
    """A new back-off that suits this rank's node. Collective."""
    return choose_backoff(*node_size(comm))


def node_size(comm: MPI.Intracomm) -> tuple[int, int]:
    """Ranks of ``comm`` on this node, and cores that they may use together, whatever they are bound to.

    Collective.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        cores = set().union(*node.allgather(mine))
        return node.size, len(cores)
    finally:
        node.Free()


def wait(requests: list[MPI.Request], backoff: Backoff) -> None:
    """Complete ``requests`` without burning a core: MPI's own wait polls flat out."""
    backoff.reset()
    while not MPI.Request.Testall(requests):
        backoff.wait()


def probe(comm: MPI.Intracomm, tag: int, status: MPI.Status) -> MPI.Message | None:
    """A message that has arrived from any rank, or None.

    Looks twice: Open MPI and MPICH look first and make progress afterwards, so that what came in since the last look is
    seen by the next one only, which in a polling loop is a whole pause later.
    """
    message = comm.Improbe(MPI.ANY_SOURCE, tag, status)
    return comm.Improbe(MPI.ANY_SOURCE, tag, status) if message is None else message


class Channel:
    """A private communicator of ranks that mean the same transport: opened and closed by all together.

    Attributes:
        comm: The communicator.
        layout: What all have agreed on.
        num_ranks_on_node: Ranks on this rank's node.
        backoff: Suits this node.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        transport: str,
        numel: int,
        dtype: Any,
        slots: int,
        chunk_bytes: int,
        num_buffers: int,
        request_based: bool = False,
        pull_dtype: Any = None,
        push_dtype: Any = None,
        push_numel: int | None = None,
    ) -> None:
        """Duplicate ``comm`` and compare the other arguments. Collective.

        Raises:
            UserError: On every rank, when a value is not allowed or the ranks disagree.
        """
        # Ranks come in at different times, and the collectives below would poll flat out for the last one.
        wait([comm.Ibarrier()], Backoff(spin_s=0.0))
        self.num_ranks_on_node, num_cores = node_size(comm)
        self.backoff = choose_backoff(self.num_ranks_on_node, num_cores)
        self.comm = comm.Dup()
        mine = {
            "transport.name": transport,
            "numel": numel,
            "dtype": np.dtype(dtype).name,
            "transport.slots": slots,
            "chunk_bytes": chunk_bytes,
            "num_buffers": num_buffers,
            "transport.request_based": request_based,
            "wire.pull": np.dtype(dtype if pull_dtype is None else pull_dtype).name,
            "wire.compression": push_numel,
            "wire.push": np.dtype(dtype if push_dtype is None else push_dtype).name,
        }
        try:
            self._require_alike(mine)
            self.layout = WindowLayout(
                self.comm.size - 1,
                numel,
                np.dtype(dtype),
                slots,
                num_buffers,
                pull_dtype,
                push_dtype,
                push_numel,
            )
        except UserError:
            self.comm.Free()  # all ranks raise alike
            raise
        self._start = MPI.Wtime()

    def _require_alike(self, mine: dict[str, Any]) -> None:
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

    def now(self) -> float:
        """Seconds on this rank's ``MPI_Wtime``, counted from where it opened the channel."""
        return MPI.Wtime() - self._start

    def meet(self) -> None:
        """Wait for all ranks. Collective."""
        wait([self.comm.Ibarrier()], self.backoff)

    def close(self) -> None:
        """Free the communicator. Collective."""
        self.comm.Free()


class MpiServer(ServerEnd):
    """Rank 0's end but for the vectors. A ``with`` block closes it, unless it is left by an exception."""

    def __init__(
        self,
        channel: Channel,
        versions: Versions,
        gradients: list[np.ndarray],
        buffers: list[np.ndarray],
    ) -> None:
        """Meet the workers, once the memory is initialised. Collective."""
        num_workers = channel.layout.num_workers
        self._channel = channel
        self._status = MPI.Status()
        self._grants = np.zeros((num_workers, 1), GRANT_DTYPE)  # one per worker: an Isend owns its buffer
        self._grant_requests = [MPI.REQUEST_NULL] * num_workers
        # MPI_WTIME_IS_GLOBAL is not asked: Intel MPI sets it, and its ranks' clocks are milliseconds apart.
        super().__init__(channel.layout, versions, gradients, buffers, clocks_agree=False)
        channel.meet()
        self._greet()

    @abstractmethod
    def _free(self) -> None:
        """Free what the transport allocated, the channel included. Collective."""

    def now(self) -> float:
        """Seconds since this rank opened the transport."""
        return self._channel.now()

    def close(self) -> None:
        """Free everything, together with every worker's ``close``. Collective; idempotent."""
        if not self._is_open:
            return
        wait(self._grant_requests, self._channel.backoff)
        self._drop()
        self._free()

    def __enter__(self: Self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Close, unless after an error: the other ranks would not come to a collective call."""
        if kind is None:
            self.close()

    def _greet(self) -> None:
        """Measure every worker's clock: a few exchanges each, as long as nothing else goes on."""
        comm = self._channel.comm
        word = np.zeros(1, np.float64)
        stamps = np.zeros(2, np.float64)
        for worker, offset in enumerate(self._offsets):
            for _ in range(NUM_HELLOS):
                request = comm.Irecv([stamps, MPI.DOUBLE], worker + 1, HELLO_TAG)
                sent = self.now()
                comm.Send([word, MPI.DOUBLE], worker + 1, HELLO_TAG)
                wait([request], self._channel.backoff)
                offset.observe(sent, stamps[0].item(), stamps[1].item(), self.now())

    def _send_grant(self, worker: int, record: np.ndarray) -> None:
        # The worker has pushed since its last grant, so it has received that one: this wait is over at once.
        self._grant_requests[worker].Wait()
        self._grants[worker] = record
        self._grant_requests[worker] = self._channel.comm.Isend(
            [self._grants[worker], GRANT_DTYPE.itemsize, MPI.BYTE], worker + 1, GRANT_TAG
        )


class MpiWorker(WorkerEnd):
    """A worker's end but for the vectors. A ``with`` block closes it, unless it is left by an exception."""

    def __init__(self, channel: Channel, chunk_bytes: int) -> None:
        """Meet the server. Collective."""
        self._channel = channel
        super().__init__(channel.comm.rank - 1, channel.layout, chunk_bytes)
        self._incoming = np.zeros(1, GRANT_DTYPE)
        self._is_stopped = False
        channel.meet()
        self._greet()
        self._expect_grant()

    @abstractmethod
    def _free(self) -> None:
        """Free what the transport allocated, the channel included. Collective."""

    def now(self) -> float:
        """Seconds on this rank's ``MPI_Wtime``, counted from where it opened the transport."""
        return self._channel.now()

    def close(self) -> None:
        """Free everything, together with the server's ``close``. Collective; idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if not self._is_stopped:  # nothing more will come for the receive that was posted ahead
            self._request.Cancel()
            self._request.Wait()
        self._free()

    def __enter__(self: Self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Close, unless after an error: the other ranks would not come to a collective call."""
        if kind is None:
            self.close()

    def _greet(self) -> None:
        """Answer the server's exchanges with the times of receipt and reply."""
        comm = self._channel.comm
        word = np.zeros(1, np.float64)
        stamps = np.zeros(2, np.float64)
        for _ in range(NUM_HELLOS):
            wait([comm.Irecv([word, MPI.DOUBLE], SERVER_RANK, HELLO_TAG)], self._channel.backoff)
            stamps[0] = self.now()
            stamps[1] = self.now()
            comm.Send([stamps, MPI.DOUBLE], SERVER_RANK, HELLO_TAG)

    def _expect_grant(self) -> None:
        self._request = self._channel.comm.Irecv(
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
        self._channel.comm.Send([record, CLOCK_DTYPE.itemsize, MPI.BYTE], SERVER_RANK, CLOCK_TAG)
