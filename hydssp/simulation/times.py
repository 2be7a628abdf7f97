"""How long iterations take on a simulated cluster: one stream of seconds per worker.

One job: models of computing time. Knows no network, no server and no paradigm. Randomness comes from a seed and the
worker's number alone, so that the order in which workers ask does not matter, and the same worker sees the same times
under every paradigm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hydssp.errors import UserError

_BLOCK = 512
"""Draws made at a time: a single one costs microseconds."""


class IterationTimes(Protocol):
    """Computing times of every worker. Implementations are frozen and without state."""

    def check(self, num_workers: int) -> None:
        """Refuse a model that does not fit the run.

        Raises:
            UserError: When it is made for another number of workers.
        """

    def stream(self, worker: int, seed: int) -> Iterator[float]:
        """Seconds of the worker's iterations 0, 1, 2, ..., without end: data, forward and backward."""

    def mean_s(self, worker: int, seed: int) -> float:
        """What the stream's mean tends to, seconds."""


def _generator(seed: int, worker: int, purpose: int = 0) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, worker, purpose]))


def _gamma(mean: float, cv: float, generator: np.random.Generator) -> Iterator[float]:
    """Gamma distributed with the given mean and coefficient of variation: shape 1/cv^2, scale mean*cv^2."""
    if cv == 0 or mean == 0:
        yield from itertools.repeat(mean)
    while True:
        yield from generator.gamma(1 / cv**2, mean * cv**2, _BLOCK).tolist()


@dataclass(frozen=True)
class Gamma:
    """Gamma-distributed times around each worker's own mean, ``factors[w] * iteration_s``; cv 0: always the mean.

    Raises:
        UserError: When a number is negative or not finite.
    """

    iteration_s: float = 0.05
    cv: float = 0.1
    """Coefficient of variation: standard deviation over mean."""
    factors: Sequence[float] | None = None
    """One per worker; None: all are equally fast."""

    def __post_init__(self) -> None:
        _require_number("cluster.iteration_s", self.iteration_s)
        _require_number("cluster.cv", self.cv)
        if self.factors is not None:
            object.__setattr__(self, "factors", tuple(self.factors))
            for factor in self.factors:
                _require_number("cluster.factors", factor)

    def check(self, num_workers: int) -> None:
        """Needs one factor per worker, if any."""
        if self.factors is not None and len(self.factors) != num_workers:
            raise UserError(
                f"cluster.factors={list(self.factors)}: {len(self.factors)} factors for {num_workers} workers; give "
                f"exactly one each, or set num_workers={len(self.factors)}"
            )

    def mean_s(self, worker: int, seed: int) -> float:
        """See ``IterationTimes``."""
        return self.iteration_s * (self.factors[worker] if self.factors is not None else 1.0)

    def stream(self, worker: int, seed: int) -> Iterator[float]:
        """See ``IterationTimes``."""
        return _gamma(self.mean_s(worker, seed), self.cv, _generator(seed, worker))


@dataclass(frozen=True)
class Machines:
    """The heterogeneous-cluster model of Ali et al. (2000), range-based on the coefficient of variation.

    Each machine's mean is drawn once from a gamma distribution with mean ``iteration_s`` and CV ``machine_cv``; each of
    its iterations from one with that mean and CV ``iteration_cv``. 0.1 and 0.1 is called homogeneous, ``machine_cv``
    0.6 heterogeneous.

    Raises:
        UserError: When a number is negative or not finite.
    """

    iteration_s: float = 0.05
    machine_cv: float = 0.6
    iteration_cv: float = 0.1

    def __post_init__(self) -> None:
        for key in ("iteration_s", "machine_cv", "iteration_cv"):
            _require_number(f"cluster.{key}", getattr(self, key))

    def check(self, num_workers: int) -> None:
        """Fits every run."""

    def mean_s(self, worker: int, seed: int) -> float:
        """The machine's own mean, drawn from the seed."""
        return next(_gamma(self.iteration_s, self.machine_cv, _generator(seed, worker, 1)))

    def stream(self, worker: int, seed: int) -> Iterator[float]:
        """See ``IterationTimes``."""
        return _gamma(self.mean_s(worker, seed), self.iteration_cv, _generator(seed, worker))


@dataclass(frozen=True)
class Measured:
    """Times that were measured, worker by worker, in their order; again from the first when they are used up.

    Raises:
        UserError: When a worker has none.
    """

    seconds: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        for worker, times in enumerate(self.seconds):
            if not len(times):
                raise UserError(
                    f"worker {worker} of the recorded run computed nothing; choose one in which every worker has pushed"
                )

    def check(self, num_workers: int) -> None:
        """Needs as many workers as were measured."""
        if num_workers != len(self.seconds):
            raise UserError(
                f"num_workers={num_workers}: the recorded run had {len(self.seconds)} workers; leave num_workers out"
            )

    def mean_s(self, worker: int, seed: int) -> float:
        """See ``IterationTimes``."""
        return math.fsum(self.seconds[worker]) / len(self.seconds[worker])

    def stream(self, worker: int, seed: int) -> Iterator[float]:
        """See ``IterationTimes``."""
        return itertools.cycle(self.seconds[worker])


@dataclass(frozen=True)
class Grouped:
    """Workers that are groups of ``size`` members each: a group is as fast as its slowest member, plus the allreduce.

    Attributes:
        members: Times of the single members; group g has members ``g*size .. g*size + size-1``.
        size: Members per group.
        allreduce_s: Seconds of the collective inside the group, per iteration.
    """

    members: IterationTimes
    size: int
    allreduce_s: float = 0.0

    def check(self, num_workers: int) -> None:
        """See ``IterationTimes``; the members' model is made for all members."""
        self.members.check(num_workers * self.size)

    def mean_s(self, worker: int, seed: int) -> float:
        """The slowest member's mean plus the allreduce: a lower bound, since the slowest changes."""
        return self.allreduce_s + max(self.members.mean_s(m, seed) for m in self._of(worker))

    def stream(self, worker: int, seed: int) -> Iterator[float]:
        """See ``IterationTimes``."""
        for times in zip(*(self.members.stream(m, seed) for m in self._of(worker)), strict=True):
            yield max(times) + self.allreduce_s

    def _of(self, group: int) -> range:
        return range(group * self.size, (group + 1) * self.size)


def _require_number(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise UserError(f"{key}={value!r}: allowed are finite numbers of 0 or more")
