"""The two protocols between the loops and a transport: interfaces only, no implementation.

Imports numpy and the standard library only. ``local`` and ``rma`` implement them and pass one contract suite
(``tests/contract``). Neither end knows coordination, Hydra or torch. Worker = MPI rank - 1.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hydssp.transport.messages import Clock, Grant, Pushed


class ServerTransport(Protocol):
    """Rank 0's end: a ring of published versions, slots for each worker's push, clock messages, grants."""

    num_workers: int
    numel: int
    """Elements of the weight vector and of each gradient slot."""
    num_buffers: int
    """Elements of each buffers slot: running statistics and counters of the model; 0 if it has none."""

    def now(self) -> float:
        """Seconds since the transport was opened, monotonic: the server's clock."""

    def progress(self) -> None:
        """Let the workers' puts and gets advance. To be called every millisecond or so while workers run."""

    def begin_publish(self, version: int) -> np.ndarray:
        """Open the ring slot of ``version`` for writing.

        Invalidates the slot's version tag first, so that a reader in the middle of it will notice.

        Args:
            version: The number after the newest published one (0 at first).

        Returns:
            1-D view of ``numel`` elements of the type in which weights travel, to be filled completely. Its content is
            stale.
        """

    def end_publish(self) -> None:
        """Tag the slot that ``begin_publish`` opened and make it the newest version."""

    def gradient(self, worker: int) -> np.ndarray:
        """The gradient slot of ``worker``: 1-D view, ``numel`` elements of the type in which gradients travel.

        The content is that of the worker's latest push and stays until the worker is granted again.
        """

    def buffers(self, worker: int) -> np.ndarray:
        """The buffers slot of ``worker``: 1-D float64 view, ``num_buffers`` elements.

        The content is that of the worker's latest push that had buffers, zeros before the first, and stays
        until the worker is granted again.
        """

    def receive(self) -> list[Pushed]:
        """All clock messages that have arrived, at most one per worker; never blocks; makes progress.

        After it returns, gradients and buffers of these pushes may be read. Message order is worker order.
        """

    def grant(self, worker: int, grant: Grant) -> None:
        """Send ``grant`` without blocking. At most one grant per push of the worker, plus the first."""

    def close(self) -> None:
        """Free everything on the agreed way out: collective, after a stop grant to every worker; idempotent.

        Every view handed out before is invalid afterwards.
        """


class WorkerTransport(Protocol):
    """A worker's end."""

    worker: int
    numel: int
    num_buffers: int

    def now(self) -> float:
        """Seconds on this worker's clock, monotonic."""

    def poll_grant(self) -> Grant | None:
        """The next grant if it has arrived, else None; never blocks; makes progress."""

    def pull(self, out: np.ndarray, version: int) -> tuple[int, int]:
        """Copy a whole published version into ``out``, never a mixture of two.

        Args:
            out: 1-D contiguous array of ``numel`` elements of the type in which weights travel.
            version: The version to try first (from the grant). When its slot has been overwritten the newest
                is read.

        Returns:
            The version really read, and how often the read had to begin again.
        """

    def push(self, gradient: np.ndarray | None, clock: Clock, buffers: np.ndarray | None = None) -> None:
        """Put ``gradient`` and ``buffers`` into this worker's slots, complete them, then send ``clock``.

        Args:
            gradient: 1-D contiguous array of ``numel`` elements of the type in which gradients travel; None for an
                empty push. Reusable on return.
            clock: Echoes the latest grant's iteration.
            buffers: 1-D contiguous float64 array of ``num_buffers`` elements; None leaves the slot as it was.
                A push with a gradient needs them, unless there are none (``num_buffers`` 0). Reusable on
                return.

        Raises:
            RuntimeError: When called without a grant.
        """

    def close(self) -> None:
        """Collective counterpart of the server's ``close``; idempotent."""
