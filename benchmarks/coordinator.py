"""Microseconds that the coordinator takes per push, by number of workers.

Usage: ``python benchmarks/coordinator.py``. Events are recorded from a virtual cluster first (workers of
unequal speed, gamma-distributed iteration times) and then replayed to a fresh coordinator, so that only the
coordinator is timed. Reasons are not read, so no strings are built.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hydssp.coordination import ASP, DSSP, SSP, Coordinator, Paradigm, Push

PARADIGMS: dict[str, Paradigm] = {"ssp": SSP(), "dssp": DSSP(), "asp": ASP()}
Event = tuple[tuple[Push, ...], float]


def record(paradigm: Paradigm, num_workers: int, num_pushes: int, spread: float, cv: float) -> list[Event]:
    """Push events of a run in virtual time: one push per event, worker means from 1 to ``spread`` seconds."""
    rng = random.Random(num_workers)
    shape = 1 / cv**2
    means = [1 + (spread - 1) * worker / max(num_workers - 1, 1) for worker in range(num_workers)]
    coordinator = Coordinator(paradigm, num_workers)
    arrivals = [
        (rng.gammavariate(shape, means[grant.worker] / shape), grant.worker)
        for grant in coordinator.start(0.0).releases
    ]
    heapq.heapify(arrivals)
    events: list[Event] = []
    while len(events) < num_pushes:
        now, worker = heapq.heappop(arrivals)
        event = ((Push(worker, now),), now)
        events.append(event)
        for grant in coordinator.on_pushes(*event).releases:
            mean = means[grant.worker]
            heapq.heappush(arrivals, (now + rng.gammavariate(shape, mean / shape), grant.worker))
    return events


def replay_us(paradigm: Paradigm, num_workers: int, events: Sequence[Event]) -> float:
    """Microseconds per push of one replay."""
    coordinator = Coordinator(paradigm, num_workers)
    coordinator.start(0.0)
    on_pushes = coordinator.on_pushes
    gc.collect()
    start_s = time.perf_counter()
    for pushes, now in events:
        on_pushes(pushes, now)
    return (time.perf_counter() - start_s) / len(events) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 128, 1024, 8192])
    parser.add_argument("--pushes", type=int, default=30_000, help="at least; never under 10 per worker")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--spread", type=float, default=2.5, help="slowest mean over fastest mean")
    parser.add_argument("--cv", type=float, default=0.1, help="coefficient of variation of iteration times")
    args = parser.parse_args()
    print(f"microseconds per push, median of {args.repeats} (spread {args.spread}, CV {args.cv})")
    print("workers " + "".join(f"{name:>9}" for name in PARADIGMS))
    for num_workers in args.workers:
        row = []
        for paradigm in PARADIGMS.values():
            num_pushes = max(args.pushes, 10 * num_workers)
            events = record(paradigm, num_workers, num_pushes, args.spread, args.cv)
            costs = [replay_us(paradigm, num_workers, events) for _ in range(args.repeats)]
            row.append(statistics.median(costs))
        print(f"{num_workers:7d} " + "".join(f"{cost:9.2f}" for cost in row), flush=True)


if __name__ == "__main__":
    main()
