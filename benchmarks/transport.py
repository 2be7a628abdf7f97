"""Latency and rate of an MPI transport, beside a memcpy of the same size in the same run.

    mpirun -np N python benchmarks/transport.py [--transport rma] [--request-based] [--slots 3]
        [--numel 10000 1000000 11000000] [--seconds 3] [--markdown]

Per size, with worker 0 alone and then with all workers at once:

- pull: the whole weight vector: got and its tag checked, or asked for and received.
- push: the whole gradient: put and flushed, or sent, and its clock message sent.
- round trip: clock message to the next grant, as the worker sees it, with an idle server. No vector.
- memcpy: copy between two arrays of the same size in the worker.

The server polls as the real one does (a back-off that suits the node) and applies nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from hydssp.transport.messages import Clock, Grant
from hydssp.transport.mpi import MpiServer, MpiWorker, node_backoff
from hydssp.transport.opening import MPI_TRANSPORTS, open_server, open_worker

MIN_REPEATS = 5
MAX_REPEATS = 2000
OPERATIONS = ("memcpy", "pull", "push", "round trip")


def serve(server: MpiServer, comm: MPI.Intracomm, active: int) -> None:
    """Grant every push at once, until every active worker has sent one with ``is_finite=False``."""
    backoff = node_backoff(comm)
    for worker in range(active):
        server.grant(worker, Grant(0, version=0, count=1))
    for worker in range(active, server.num_workers):
        server.grant(worker, Grant(0, version=0, stop=True))
    num_left = active
    while num_left:
        pushes = server.receive()
        for push in pushes:
            is_done = not push.clock.is_finite
            num_left -= is_done
            server.grant(push.worker, Grant(push.clock.iteration + 1, version=0, count=1, stop=is_done))
        if pushes:
            backoff.reset()
        else:
            backoff.wait()


class Load:
    """One worker's side: times of its operations."""

    def __init__(self, worker: MpiWorker, comm: MPI.Intracomm, seconds: float) -> None:
        self.worker = worker
        self.backoff = node_backoff(comm)
        self.seconds = seconds
        self.out = np.ones(worker.numel, np.float32)
        self.other = np.zeros(worker.numel, np.float32)
        self.iteration = 0

    def next_grant(self) -> Grant:
        """Wait as the real worker does."""
        self.backoff.reset()
        while (grant := self.worker.poll_grant()) is None:
            self.backoff.wait()
        self.iteration = grant.iteration
        return grant

    def push(self, gradient: np.ndarray | None, is_finite: bool = True) -> None:
        """Answer the latest grant."""
        samples = 0 if gradient is None else 1
        self.worker.push(gradient, Clock(self.iteration, 0, samples=samples, is_finite=is_finite))

    def repeat(self, operation: Callable[[], None], between: Callable[[], object]) -> list[float]:
        """Seconds of each ``operation``; ``between`` is not timed."""
        times: list[float] = []
        until = time.perf_counter() + self.seconds / len(OPERATIONS)
        while len(times) < MIN_REPEATS or (len(times) < MAX_REPEATS and time.perf_counter() < until):
            began = time.perf_counter()
            operation()
            times.append(time.perf_counter() - began)
            between()
        return times

    def run(self) -> dict[str, list[float]]:
        """Seconds of each repetition by operation; empty when this worker is not to take part."""

        def nothing() -> None: ...

        def round_trip() -> None:
            self.push(None)
            self.next_grant()

        if self.next_grant().stop:
            return {}
        times = {
            "memcpy": self.repeat(lambda: np.copyto(self.other, self.out), nothing),
            "pull": self.repeat(lambda: void(self.worker.pull(self.out, 0)), nothing),
            "push": self.repeat(lambda: self.push(self.out), self.next_grant),
            "round trip": self.repeat(round_trip, nothing),
        }
        self.push(None, is_finite=False)
        self.next_grant()
        return times


def void(_: object) -> None:
    """Drop a result."""


def measure(
    comm: MPI.Intracomm, options: argparse.Namespace, numel: int, active: int
) -> dict[str, list[float]]:
    """Times of all active workers together, on every rank."""
    arguments: dict[str, Any] = {"slots": options.slots}
    if options.request_based:
        arguments["request_based"] = True
    mine: dict[str, list[float]] = {}
    if comm.rank == 0:
        with open_server(options.transport, comm, numel, np.float32, **arguments) as server:
            server.begin_publish(0)[:] = 1.0
            server.end_publish()
            serve(server, comm, active)
    else:
        with open_worker(options.transport, comm, numel, np.float32, **arguments) as worker:
            mine = Load(worker, comm, options.seconds).run()
    everyone = comm.allgather(mine)
    return {name: [at for times in everyone for at in times.get(name, ())] for name in OPERATIONS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--transport", choices=MPI_TRANSPORTS, default="rma")
    parser.add_argument("--request-based", action="store_true", help="rma with Rput and Rget")
    parser.add_argument("--slots", type=int, default=3, help="versions in the ring of rma")
    parser.add_argument("--numel", type=int, nargs="+", default=[10_000, 1_000_000, 11_000_000])
    parser.add_argument("--seconds", type=float, default=3.0, help="per size and number of workers")
    parser.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    if comm.size < 2:
        print("start at least two ranks: mpirun -np 2 python benchmarks/transport.py", file=sys.stderr)
        return 2
    form = "{:>11} {:>8} {:>11} {:>8} {:>12} {:>12} {:>10}"
    if options.markdown:
        form = "| {} | {} | {} | {} | {} | {} | {} |"
    if comm.rank == 0:
        print(
            MPI.Get_library_version().split(",")[0].splitlines()[0], f"- {comm.size} ranks, float32,", end=" "
        )
        print(options.transport, "request-based" if options.request_based else "")
        print(form.format("elements", "workers", "operation", "times", "median us", "p99 us", "GB/s each"))
        if options.markdown:
            print(form.format(*["---"] * 7))
    for numel in options.numel:
        for active in sorted({1, comm.size - 1}):
            times = measure(comm, options, numel, active)
            if comm.rank > 0:
                continue
            for name, seconds in times.items():
                median = float(np.median(seconds))
                rate = "" if name == "round trip" else f"{4 * numel / median / 1e9:.2f}"
                p99 = float(np.percentile(seconds, 99))
                print(
                    form.format(
                        numel, active, name, len(seconds), f"{median * 1e6:.1f}", f"{p99 * 1e6:.1f}", rate
                    ),
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
