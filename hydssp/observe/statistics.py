"""Accumulators: numbers go in one by one, a few figures come out. Pure: no files, no clock, no randomness."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def loss_window(num_workers: int) -> int:
    """How many of the latest pushes the training loss at the end of a run is the mean of."""
    return max(100, 4 * num_workers)


def _added(some: Mapping[int, int], others: Mapping[int, int]) -> dict[int, int]:
    return {key: some.get(key, 0) + others.get(key, 0) for key in {**some, **others}}


class IntHistogram:
    """How often each integer occurred."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0
        """Number of values added."""
        self.sum = 0
        """Sum of the values added."""

    def add(self, value: int) -> None:
        """Count ``value`` once more."""
        self.counts[value] = self.counts.get(value, 0) + 1
        self.total += 1
        self.sum += value

    def __add__(self, other: IntHistogram) -> IntHistogram:
        """What both have counted."""
        both = IntHistogram()
        both.counts = _added(self.counts, other.counts)
        both.total = self.total + other.total
        both.sum = self.sum + other.sum
        return both

    @property
    def mean(self) -> float | None:
        """Mean of the values; None when there are none."""
        return self.sum / self.total if self.total else None

    @property
    def max(self) -> int | None:
        """Largest value; None when there are none."""
        return max(self.counts, default=None)

    def quantile(self, q: float) -> int | None:
        """Smallest value that at least the share ``q`` of all values does not exceed (nearest rank).

        Args:
            q: Between 0 and 1.

        Returns:
            The value, one that occurred; None when there are none.
        """
        wanted = q * self.total
        seen = 0
        for value in sorted(self.counts):
            seen += self.counts[value]
            if seen >= wanted:
                return value
        return None

    def to_dict(self) -> dict[str, Any]:
        """``{mean, p50, p99, max, histogram}``; the histogram's keys are text, as JSON wants them."""
        return {
            "mean": self.mean,
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "max": self.max,
            "histogram": {str(value): self.counts[value] for value in sorted(self.counts)},
        }


class LogHistogram:
    """How often a number of at least 0 fell between two neighbours of a geometric scale; also mean and maximum.

    A decade has ``PER_DECADE`` bins: 1, 1.78, 3.16, 5.62, 10. What is not finite is left out.
    """

    PER_DECADE = 4
    _ZERO = -(10**6)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        """By number of the bin; all zeros lie in a bin of their own, below every other."""
        self.total = 0
        self.sum = 0.0
        self.square_sum = 0.0
        self.max: float | None = None

    def add(self, value: float) -> None:
        """Count ``value`` once more."""
        if not 0 <= value < math.inf:
            return
        # The nudge keeps 10 in the bin that begins with it, whatever the logarithm's last bit.
        number = math.floor(math.log10(value) * self.PER_DECADE + 1e-9) if value else self._ZERO
        self.counts[number] = self.counts.get(number, 0) + 1
        self.total += 1
        self.sum += value
        self.square_sum += value * value
        if self.max is None or value > self.max:
            self.max = value

    def __add__(self, other: LogHistogram) -> LogHistogram:
        """What both have counted."""
        both = LogHistogram()
        both.counts = _added(self.counts, other.counts)
        both.total = self.total + other.total
        both.sum = self.sum + other.sum
        both.square_sum = self.square_sum + other.square_sum
        both.max = max((m for m in (self.max, other.max) if m is not None), default=None)
        return both

    def lower_edge(self, number: int) -> float:
        """Where bin ``number`` begins."""
        return 0.0 if number == self._ZERO else 10.0 ** (number / self.PER_DECADE)

    def bins(self) -> list[tuple[float, float, int]]:
        """``(from, to, count)`` of every bin that has something in it, in rising order."""
        return [
            (self.lower_edge(n), 0.0 if n == self._ZERO else self.lower_edge(n + 1), self.counts[n])
            for n in sorted(self.counts)
        ]

    @property
    def mean(self) -> float | None:
        """Mean of the values; None when there are none."""
        return self.sum / self.total if self.total else None

    def to_dict(self) -> dict[str, Any]:
        """``{mean, max, histogram}``; the histogram's keys are the bins' lower edges, as text."""
        return {
            "mean": self.mean,
            "max": self.max,
            "histogram": {f"{low:.3g}": count for low, _, count in self.bins()},
        }


class WindowMean:
    """Weighted mean of the latest values; what is not finite is left out."""

    def __init__(self, size: int) -> None:
        """Keep the latest ``size`` values, at least 1."""
        self._values: deque[tuple[float, float]] = deque(maxlen=size)

    def add(self, value: float, weight: float) -> None:
        """Add ``value``; of no effect when it is nan or inf."""
        if math.isfinite(value):
            self._values.append((value, weight))

    @property
    def mean(self) -> float | None:
        """The mean; None when no finite value with a weight has come."""
        # Summed anew at each reading: running sums would drift, and readings are rare.
        weight = math.fsum(weight for _, weight in self._values)
        return math.fsum(value * weight for value, weight in self._values) / weight if weight > 0 else None


@dataclass(slots=True)
class Totals:
    """Sums over all workers since the start. Two snapshots of it make the rates of the time between them."""

    pushes: int = 0
    updates: int = 0
    samples: int = 0
    """Samples of the gradients that were accepted."""
    loss_sum: float = 0.0
    """Sum of loss times samples, finite losses only."""
    loss_samples: int = 0
    correct: int = 0
    correct_samples: int = 0
    staleness_sum: int = 0
    staleness_count: int = 0


@dataclass(slots=True)
class WorkerStatistics:
    """What one worker did. Durations are sums in seconds."""

    clock: int = 0
    """Pushes that the coordinator counted."""
    pushes: int = 0
    """Those of them that came before the run had ended."""
    samples: int = 0
    updates: int = 0
    """Updates that this worker's gradient was part of."""
    samples_applied: int = 0
    staleness_sum: int = 0
    pull_retries: int = 0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    device_bytes: int = 0
    data_s: float = 0.0
    pull_s: float = 0.0
    compute_s: float = 0.0
    push_s: float = 0.0
    wait_s: float = 0.0
    """From each push until the worker saw its next grant: holds, the server's work and the messages' way."""
    holds: int = 0
    held_s: dict[str, float] = field(default_factory=dict)
    """The part of ``wait_s`` spent held, by cause."""
    waits_since: float | None = None
    """Time of the latest push while the wait that follows it is not summed up yet."""
    grant_sent_at: float | None = None
    """When the wait that is not summed up yet was ended by the server."""
    hold_cause: str | None = None
    """Why it is held now; None when it is not."""
    is_active: bool = True

    def end_wait(self, at: float) -> None:
        """Sum up the wait that began with the latest push; of no effect when none is open."""
        if self.waits_since is not None:
            # Mapped clocks may be off by microseconds; a wait is never negative.
            self.wait_s += max(0.0, at - self.waits_since)
            self.waits_since = None
        self.grant_sent_at = None

    def leave(self, at: float) -> None:
        """The worker leaves the active set; an open wait ends with the grant it was sent, else now."""
        self.end_wait(at if self.grant_sent_at is None else self.grant_sent_at)
        self.hold_cause = None
        self.is_active = False

    def times(self) -> dict[str, float]:
        """``{data, pull, compute, push, wait}``, seconds."""
        return {
            "data": self.data_s,
            "pull": self.pull_s,
            "compute": self.compute_s,
            "push": self.push_s,
            "wait": self.wait_s,
        }

    def counts(self) -> dict[str, Any]:
        """Everything that is not a sum of time by phase."""
        return {
            "pushes": self.pushes,
            "samples": self.samples,
            "updates": self.updates,
            "samples_applied": self.samples_applied,
            "staleness_mean": self.staleness_sum / self.updates if self.updates else None,
            "pull_retries": self.pull_retries,
            "holds": self.holds,
            "held_s": dict(self.held_s),
        }


def share_of_time(times: Mapping[str, float]) -> dict[str, float]:
    """Each phase's share of the sum, between 0 and 1; all 0 when the sum is 0."""
    total = math.fsum(times.values())
    return {phase: seconds / total if total > 0 else 0.0 for phase, seconds in times.items()}
