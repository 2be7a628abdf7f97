"""The transport of plain messages, for sites whose one-sided operations are broken: no window at all.

Same contract as ``rma``. Knows MPI and numpy, nothing of coordination, Hydra or torch.

- Push: for every grant the server first posts the receives of the gradient and the buffers, straight into the
  worker's slots; a push fills them and the clock message follows. An empty push fills them with messages of no
  elements, so that they complete with every push. The server hands a push out once they are complete.
- Pull: the worker asks; the server answers with the number of the newest version and the version itself, sent
  from memory that is not written again before the send is complete (``snapshots``). So a pull is never torn,
  never begins again, and may be newer than the version that was granted.
- The server never waits for a worker: it posts, probes and tests, each time it is in ``receive`` or
  ``progress``. Many networks move a large message only while both sides are in MPI, some kilobytes at a time.
  So the worker stays there until its vector is through, and so does the server in ``receive``, for up to
  ``LINGER_S`` and as long as there is no push to hand out; of pushes under way it learns by an announcement.
- Element types and pieces of at most 1 GiB, because some libraries refuse counts above 2**31 - 1.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import numpy as np
from mpi4py import MPI

from hydssp.transport.messages import CLOCK_DTYPE, Pushed
from hydssp.transport.mpi import (
    CLOCK_TAG,
    ELEMENT_TYPES,
    SERVER_RANK,
    Channel,
    MpiServer,
    MpiWorker,
    probe,
    wait,
)
from hydssp.transport.ring import BUFFERS_DTYPE, DEFAULT_SLOTS, MAX_CHUNK_BYTES, chunks
from hydssp.transport.snapshots import Snapshots

PULL_TAG = 4
VERSION_TAG = 5
WEIGHTS_TAG = 6
GRADIENT_TAG = 7
BUFFERS_TAG = 8
ANNOUNCE_TAG = 9
LINGER_S = 5e-3
"""Longer than the server's longest sleep between two calls, so that vectors move most of the time."""


def _pieces(vector: np.ndarray, chunk_bytes: int) -> list[Any]:
    """``vector`` as the buffers of its messages."""
    kind = ELEMENT_TYPES[vector.dtype.name]
    return [
        [vector[start:stop], stop - start, kind]
        for start, stop in chunks(len(vector), chunk_bytes // vector.itemsize)
    ]


def _empty_pieces(numel: int, dtype: np.dtype, chunk_bytes: int) -> list[Any]:
    """As many messages as a vector of ``numel`` elements has, but without elements."""
    kind = ELEMENT_TYPES[dtype.name]
    return [[None, 0, kind] for _ in chunks(numel, chunk_bytes // dtype.itemsize)]


def _move(requests: list[MPI.Request]) -> None:
    """Stay in MPI until ``requests`` are complete, but leave the core to whoever needs it."""
    while not MPI.Request.Testall(requests):
        os.sched_yield()


class TwoSidedServer(MpiServer):
    """Rank 0's end. A ``with`` block closes it, unless it is left by an exception."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        numel: int,
        dtype: Any = np.float32,
        slots: int = DEFAULT_SLOTS,
        chunk_bytes: int = MAX_CHUNK_BYTES,
        num_buffers: int = 0,
        pull_dtype: Any = None,
        push_dtype: Any = None,
        push_numel: int | None = None,
    ) -> None:
        """Open together with ``TwoSidedWorker`` on all other ranks, with the same arguments. Collective.

        Args:
            comm: Duplicated; may be used for other things meanwhile.
            numel: Elements of the weight vector.
            dtype: float32 or float64.
            slots: As for ``rma``, which has a ring; without effect here, where versions are kept as needed.
            chunk_bytes: Largest message.
            num_buffers: Elements of each worker's buffers.
            pull_dtype: Elements of the weights as they travel; None: ``dtype``.
            push_dtype: The same for gradients.
            push_numel: Elements of a gradient as it travels; None: ``numel``.

        Raises:
            UserError: On every rank, when a value is not allowed or the ranks disagree.
        """
        channel = Channel(
            comm,
            "two_sided",
            numel,
            dtype,
            slots,
            chunk_bytes,
            num_buffers,
            pull_dtype=pull_dtype,
            push_dtype=push_dtype,
            push_numel=push_numel,
        )
        layout = channel.layout
        workers = range(layout.num_workers)
        self._chunk_bytes = chunk_bytes
        self._snapshots = Snapshots(layout.numel, layout.weights_dtype)
        self._arrived: list[tuple[int, np.ndarray]] = []
        self._receives: list[list[MPI.Request]] = [[] for _ in workers]
        self._announced: set[int] = set()  # workers whose gradients are under way
        self._sends: dict[int, tuple[int, list[MPI.Request]]] = {}  # worker -> version and what is under way
        self._answers = np.zeros((layout.num_workers, 1), np.int64)
        gradients = [np.zeros(layout.gradient_numel, layout.gradient_dtype) for _ in workers]
        buffers = [np.zeros(layout.num_buffers, BUFFERS_DTYPE) for _ in workers]
        super().__init__(channel, self._snapshots, gradients, buffers)

    def progress(self) -> None:
        """Take messages in, answer pulls, let vectors move on."""
        self._require_open()
        self._serve()

    def receive(self) -> list[Pushed]:
        """All clock messages whose vectors are there, in worker order; see the protocol.

        Raises:
            RuntimeError: When the transport is closed.
        """
        pushes = super().receive()
        until = self.now() + LINGER_S
        while not pushes and (self._sends or self._announced) and self.now() < until:
            os.sched_yield()
            pushes = super().receive()
        return pushes

    def _serve(self) -> None:
        for worker, (version, requests) in [*self._sends.items()]:
            if MPI.Request.Testall(requests):
                self._snapshots.release(version)
                del self._sends[worker]
        # Receives of gradients and buffers are posted before their messages can come, so that a probe finds
        # the small messages only.
        while (message := probe(self._channel.comm, MPI.ANY_TAG, self._status)) is not None:
            worker = self._status.source - 1
            if self._status.tag == CLOCK_TAG:
                record = np.zeros(1, CLOCK_DTYPE)
                message.Recv([record, CLOCK_DTYPE.itemsize, MPI.BYTE])
                self._arrived.append((worker, record))
                continue
            message.Recv([None, 0, MPI.BYTE])
            if self._status.tag == ANNOUNCE_TAG:
                self._announced.add(worker)
            else:
                self._answer_pull(worker)

    def _answer_pull(self, worker: int) -> None:
        if worker in self._sends:  # it asks again, so it has received the last answer: this is over at once
            version, requests = self._sends.pop(worker)
            MPI.Request.Waitall(requests)
            self._snapshots.release(version)
        comm = self._channel.comm
        acquired = self._snapshots.acquire()
        self._answers[worker] = -1 if acquired is None else acquired[0]
        requests = [comm.Isend([self._answers[worker], 1, MPI.INT64_T], worker + 1, VERSION_TAG)]
        if acquired is None:
            requests[0].Wait()  # eight bytes, which the worker waits for
            return
        version, weights = acquired
        requests += [
            comm.Isend(piece, worker + 1, WEIGHTS_TAG) for piece in _pieces(weights, self._chunk_bytes)
        ]
        self._sends[worker] = version, requests

    def _sync(self) -> None:
        """A receive that is complete needs no barrier."""

    def _next_clock(self, record: np.ndarray) -> int | None:
        self._serve()
        for place, (worker, arrived) in enumerate(self._arrived):
            if MPI.Request.Testall(self._receives[worker]):
                record[:] = arrived
                del self._arrived[place]
                self._announced.discard(worker)
                return worker
        return None

    def _send_grant(self, worker: int, record: np.ndarray) -> None:
        if not record["stop"][0]:
            comm = self._channel.comm
            self._receives[worker] = [
                comm.Irecv(piece, worker + 1, tag)
                for vector, tag in (
                    (self._gradients[worker], GRADIENT_TAG),
                    (self._buffers[worker], BUFFERS_TAG),
                )
                for piece in _pieces(vector, self._chunk_bytes)
            ]
        super()._send_grant(worker, record)

    def _free(self) -> None:
        for requests in self._receives:
            for request in requests:
                if request:  # granted and never pushed: only after an error
                    request.Cancel()
            wait(requests, self._channel.backoff)
        for _, requests in self._sends.values():
            wait(requests, self._channel.backoff)
        self._channel.meet()
        self._channel.close()


class TwoSidedWorker(MpiWorker):
    """A worker's end. A ``with`` block closes it, unless it is left by an exception."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        numel: int,
        dtype: Any = np.float32,
        slots: int = DEFAULT_SLOTS,
        chunk_bytes: int = MAX_CHUNK_BYTES,
        num_buffers: int = 0,
        pull_dtype: Any = None,
        push_dtype: Any = None,
        push_numel: int | None = None,
    ) -> None:
        """Open together with ``TwoSidedServer`` on rank 0, with the same arguments. Collective.

        Args:
            comm: Duplicated; may be used for other things meanwhile.
            numel: Elements of the weight vector.
            dtype: float32 or float64.
            slots: As for ``rma``, which has a ring; without effect here, where versions are kept as needed.
            chunk_bytes: Largest message.
            num_buffers: Elements of each worker's buffers.
            pull_dtype: Elements of the weights as they travel; None: ``dtype``.
            push_dtype: The same for gradients.
            push_numel: Elements of a gradient as it travels; None: ``numel``.

        Raises:
            UserError: On every rank, when a value is not allowed or the ranks disagree.
        """
        channel = Channel(
            comm,
            "two_sided",
            numel,
            dtype,
            slots,
            chunk_bytes,
            num_buffers,
            pull_dtype=pull_dtype,
            push_dtype=push_dtype,
            push_numel=push_numel,
        )
        self._answer = np.zeros(1, np.int64)
        super().__init__(channel, chunk_bytes)

    def _read(self, out: np.ndarray, version: int) -> Generator[None, None, tuple[int, int]]:
        comm = self._channel.comm
        request = comm.Irecv([self._answer, 1, MPI.INT64_T], SERVER_RANK, VERSION_TAG)
        comm.Send([None, 0, MPI.BYTE], SERVER_RANK, PULL_TAG)
        wait([request], self._channel.backoff)
        version = int(self._answer[0])
        if version < 0:
            raise RuntimeError("pull before the server has published anything")
        for piece in _pieces(out, self._chunk_bytes):
            _move([comm.Irecv(piece, SERVER_RANK, WEIGHTS_TAG)])
            yield
        return version, 0

    def _put(self, gradient: np.ndarray | None, buffers: np.ndarray | None) -> None:
        comm = self._channel.comm
        requests = []
        if gradient is not None:
            comm.Send([None, 0, MPI.BYTE], SERVER_RANK, ANNOUNCE_TAG)
        for vector, numel, dtype, tag in (
            (gradient, self._layout.gradient_numel, self._layout.gradient_dtype, GRADIENT_TAG),
            (buffers, self.num_buffers, BUFFERS_DTYPE, BUFFERS_TAG),
        ):
            pieces = (
                _empty_pieces(numel, dtype, self._chunk_bytes)
                if vector is None
                else _pieces(vector, self._chunk_bytes)
            )
            requests += [comm.Isend(piece, SERVER_RANK, tag) for piece in pieces]
        _move(requests)  # afterwards the arrays may be used again

    def _free(self) -> None:
        self._channel.meet()
        self._channel.close()
