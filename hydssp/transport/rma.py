"""The default transport: MPI one-sided windows for vectors, small messages for clocks and grants.

Knows MPI and numpy, nothing of coordination, Hydra or torch.

What this file relies on:

- One window from ``MPI_Win_allocate``, memory on rank 0 alone. Windows over foreign memory
  (``MPI_Win_create``) are slower by orders of magnitude on some libraries.
- One ``MPI_Win_lock_all(MPI_MODE_NOCHECK)`` epoch from start to end on every rank, rank 0 included. A lock
  per operation would need the server's attention each time; within one epoch only the operations travel.
- Put and Get, completed by ``MPI_Win_flush``. Put then flush: complete at the server before the clock message
  is sent. Get then flush: in the reader's memory before the tag is asked for. No accumulate: each gradient
  slot has one writer.
- ``request_based`` takes Rput and Rget with a wait instead, which some networks complete sooner. A wait for
  an Rput only frees its buffer, so that the flush stays; a wait for an Rget is as good as a flush.
- ``MPI_Win_sync`` on the server orders its own loads and stores against those operations (MPI standard,
  unified memory model: between the clock message and the first load of the gradient; around every store of a
  tag).
- The server enters MPI at least every millisecond or so while workers are active (``receive``, ``progress``):
  some libraries move data only then.
- Element types and pieces of at most 1 GiB, because some libraries refuse counts above 2**31 - 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from hydssp.errors import UserError
from hydssp.transport.ends import RingReader
from hydssp.transport.memory import check_memory, free_memory
from hydssp.transport.messages import CLOCK_DTYPE
from hydssp.transport.mpi import (
    CLOCK_TAG,
    ELEMENT_TYPES,
    SERVER_RANK,
    Channel,
    MpiServer,
    MpiWorker,
    probe,
)
from hydssp.transport.ring import DEFAULT_SLOTS, MAX_CHUNK_BYTES, RingWriter, chunks


class _Window:
    """The window and its epoch: opened and closed by all ranks of a channel together."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        layout, comm = channel.layout, channel.comm
        is_server = comm.rank == SERVER_RANK
        try:
            self._require_memory()
        except UserError:
            channel.close()  # all ranks raise alike
            raise
        info = MPI.Info.Create([("same_disp_unit", "true"), ("mpi_minimum_memory_alignment", "64")])
        self.win = MPI.Win.Allocate(layout.total_bytes if is_server else 0, 1, info, comm)
        info.Free()
        self.win.Lock_all(MPI.MODE_NOCHECK)
        # A byte view. It keeps no window alive: after Free it points nowhere, so ``close`` drops it first.
        memory: Any = self.win.tomemory() if is_server else b""
        self.memory = np.frombuffer(memory, np.uint8)

    def _require_memory(self) -> None:
        """Let the server look whether the window fits, and raise its error on every rank."""
        channel = self._channel
        message = None
        if channel.comm.rank == SERVER_RANK:
            try:
                check_memory(channel.layout, *free_memory(channel.num_ranks_on_node > 1))
            except UserError as error:
                message = str(error)
        message = channel.comm.bcast(message, root=SERVER_RANK)
        if message is not None:
            raise UserError(message)

    def close(self) -> None:
        """Wait for all, then free window and channel. Collective."""
        self._channel.meet()
        del self.memory
        self.win.Unlock_all()
        self.win.Free()
        self._channel.close()


class RmaServer(MpiServer):
    """Rank 0's end. A ``with`` block closes it, unless it is left by an exception."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        numel: int,
        dtype: Any = np.float32,
        slots: int = DEFAULT_SLOTS,
        chunk_bytes: int = MAX_CHUNK_BYTES,
        num_buffers: int = 0,
        request_based: bool = False,
        pull_dtype: Any = None,
        push_dtype: Any = None,
        push_numel: int | None = None,
    ) -> None:
        """Open together with ``RmaWorker`` on all other ranks, with the same arguments. Collective.

        Args:
            comm: Duplicated; may be used for other things meanwhile.
            numel: Elements of the weight vector.
            dtype: float32 or float64.
            slots: Versions in the ring, at least 3.
            chunk_bytes: Largest piece of one put or get.
            num_buffers: Elements of each worker's buffers.
            request_based: The workers use Rput and Rget.
            pull_dtype: Elements of the weights as they travel; None: ``dtype``.
            push_dtype: The same for gradients.
            push_numel: Elements of a gradient as it travels; None: ``numel``.

        Raises:
            UserError: On every rank, when a value is not allowed, the window does not fit into the memory of
                rank 0's node, or the ranks disagree.
        """
        channel = Channel(
            comm,
            "rma",
            numel,
            dtype,
            slots,
            chunk_bytes,
            num_buffers,
            request_based,
            pull_dtype,
            push_dtype,
            push_numel,
        )
        self._window = _Window(channel)
        layout, memory = channel.layout, self._window.memory
        ring = RingWriter(layout, memory, self._sync)
        super().__init__(channel, ring, layout.gradients(memory), layout.buffers(memory))

    def progress(self) -> None:
        """Enter MPI once."""
        self._require_open()
        self._channel.comm.Iprobe(MPI.ANY_SOURCE, CLOCK_TAG)

    def _sync(self) -> None:
        self._window.win.Sync()

    def _next_clock(self, record: np.ndarray) -> int | None:
        message = probe(self._channel.comm, CLOCK_TAG, self._status)
        if message is None:
            return None
        message.Recv([record, CLOCK_DTYPE.itemsize, MPI.BYTE])
        return self._status.source - 1

    def _free(self) -> None:
        self._window.close()


class RmaWorker(MpiWorker, RingReader):
    """A worker's end. A ``with`` block closes it, unless it is left by an exception."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        numel: int,
        dtype: Any = np.float32,
        slots: int = DEFAULT_SLOTS,
        chunk_bytes: int = MAX_CHUNK_BYTES,
        num_buffers: int = 0,
        request_based: bool = False,
        pull_dtype: Any = None,
        push_dtype: Any = None,
        push_numel: int | None = None,
    ) -> None:
        """Open together with ``RmaServer`` on rank 0, with the same arguments. Collective.

        Args:
            comm: Duplicated; may be used for other things meanwhile.
            numel: Elements of the weight vector.
            dtype: float32 or float64.
            slots: Versions in the ring, at least 3.
            chunk_bytes: Largest piece of one put or get.
            num_buffers: Elements of each worker's buffers.
            request_based: Use Rput and Rget with a wait instead of Put and Get with a flush.
            pull_dtype: Elements of the weights as they travel; None: ``dtype``.
            push_dtype: The same for gradients.
            push_numel: Elements of a gradient as it travels; None: ``numel``.

        Raises:
            UserError: On every rank, when a value is not allowed, the window does not fit into the memory of
                rank 0's node, or the ranks disagree.
        """
        channel = Channel(
            comm,
            "rma",
            numel,
            dtype,
            slots,
            chunk_bytes,
            num_buffers,
            request_based,
            pull_dtype,
            push_dtype,
            push_numel,
        )
        self._window = _Window(channel)
        self._request_based = request_based
        self._word = np.zeros(1, np.int64)
        super().__init__(channel, chunk_bytes)

    def read_weights(self, slot: int, start: int, stop: int, out: np.ndarray) -> None:
        """Get a piece of a slot and complete it."""
        layout = self._layout
        offset = layout.weights_offset(slot) + start * layout.weights_dtype.itemsize
        self._get(out[start:stop], ELEMENT_TYPES[layout.weights_dtype.name], offset)

    def read_tag(self, slot: int) -> int:
        """The version in ``slot``."""
        self._get(self._word, MPI.INT64_T, self._layout.tag_offset(slot))
        return int(self._word[0])

    def read_latest(self) -> int:
        """The newest published version."""
        self._get(self._word, MPI.INT64_T, self._layout.latest_offset)
        return int(self._word[0])

    def _get(self, out: np.ndarray, kind: MPI.Datatype, offset: int) -> None:
        """Get ``out`` from byte ``offset``; it is here on return, before anything else is asked for."""
        win, origin, target = self._window.win, [out, len(out), kind], (offset, len(out), kind)
        if self._request_based:
            win.Rget(origin, SERVER_RANK, target).Wait()
        else:
            win.Get(origin, SERVER_RANK, target)
            win.Flush(SERVER_RANK)

    def _put(self, gradient: np.ndarray | None, buffers: np.ndarray | None) -> None:
        if gradient is None and buffers is None:
            return
        layout, requests = self._layout, []
        if gradient is not None:
            requests += self._start_puts(gradient, layout.gradient_offset(self.worker))
        if buffers is not None:
            requests += self._start_puts(buffers, layout.buffers_offset(self.worker))
        MPI.Request.Waitall(requests)
        self._window.win.Flush(SERVER_RANK)  # complete at the server before the clock message can tell of it

    def _start_puts(self, vector: np.ndarray, base: int) -> list[MPI.Request]:
        """Put ``vector`` to byte ``base`` and on; returns what is to be waited for, nothing without requests."""
        win, kind = self._window.win, ELEMENT_TYPES[vector.dtype.name]
        requests = []
        for start, stop in chunks(len(vector), self._chunk_bytes // vector.itemsize):
            origin = [vector[start:stop], stop - start, kind]
            target = (base + start * vector.itemsize, stop - start, kind)
            if self._request_based:
                requests.append(win.Rput(origin, SERVER_RANK, target))
            else:
                win.Put(origin, SERVER_RANK, target)
        return requests

    def _free(self) -> None:
        self._window.close()
