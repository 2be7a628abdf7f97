"""The ranks of one job outside training: broadcasts, gathers and barriers that wait with pauses.

One job: the few collective steps before and after training. MPI's own blocking collectives burn a core while they
wait; these sleep. Nothing here is on the path of a push. This and the MPI transports are the only users of mpi4py.
"""

from __future__ import annotations

import itertools
import pickle
import time
from typing import Any

import numpy as np


class Session:
    """A private copy of the world communicator.

    Attributes:
        comm: The communicator, for the transport to duplicate.
        rank: 0 is the server.
        size: Number of ranks.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank = self.comm.rank
        self.size = self.comm.size

    @property
    def library(self) -> str:
        """Name and version of the MPI library, one line."""
        return self._mpi.Get_library_version().split("\n")[0].rstrip("\0")

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's ``value`` on every rank."""
        payload = bytearray(pickle.dumps(value) if self.rank == 0 else b"")
        size = np.array([len(payload)], np.int64)
        self._wait(self.comm.Ibcast(size, root=0))
        if self.rank != 0:
            payload = bytearray(int(size[0]))
        self._wait(self.comm.Ibcast(payload, root=0))
        return value if self.rank == 0 else pickle.loads(payload)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank."""
        payload = np.frombuffer(pickle.dumps(value), np.uint8).copy()
        sizes = np.empty(self.size, np.int64)
        self._wait(self.comm.Iallgather(np.array([len(payload)], np.int64), sizes))
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        everything = np.empty(offsets[-1], np.uint8)
        receive = [everything, (sizes, offsets[:-1]), self._mpi.BYTE]
        self._wait(self.comm.Iallgatherv([payload, self._mpi.BYTE], receive))
        return [pickle.loads(everything[a:b].tobytes()) for a, b in itertools.pairwise(offsets)]

    def barrier(self) -> None:
        """Wait for every rank."""
        self._wait(self.comm.Ibarrier())

    def _wait(self, request: Any) -> None:
        pause_s = 20e-6
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)
