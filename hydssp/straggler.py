"""How long each iteration of each worker shall take at least: emulated slow workers.

A worker sleeps at the end of an iteration until ``target_s`` has passed since its start. ``iteration_s`` is
therefore to be longer than the real computing time: the emulated cluster then depends neither on the load nor
on the number of cores of the machine. Padding by sleep and not by load, because loaded cores measure the
scheduler.

Pure: standard library only; does not sleep, reads no clock, keeps no state. Randomness comes from (seed,
worker, iteration) alone, so that the order of the calls does not matter and a real run and a simulated one
see the same pauses.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from hydssp.errors import UserError


class Straggler(Protocol):
    """A pattern of slow iterations. Implementations are frozen and without state."""

    def check(self, num_workers: int) -> None:
        """Refuse a pattern that does not fit the run; called once before the start.

        Args:
            num_workers: Workers of the run, at least 1.

        Raises:
            UserError: When the pattern is made for another number of workers.
        """

    def target_s(self, worker: int, iteration: int) -> float:
        """The least time of one iteration.

        Args:
            worker: 0 .. num_workers-1.
            iteration: The worker's own count of iterations, from 0.

        Returns:
            Seconds from the start of the iteration (after the grant); 0.0: no padding.
        """


@dataclass(frozen=True)
class NoStraggler:
    """No padding: every worker runs as fast as it can."""

    def check(self, num_workers: int) -> None:
        """Fits every run."""

    def target_s(self, worker: int, iteration: int) -> float:
        """Always 0.0."""
        return 0.0


@dataclass(frozen=True)
class ConstantFactors:
    """Workers of permanently different speed: iterations of worker w take ``factors[w] * iteration_s``.

    Raises:
        UserError: When a factor or ``iteration_s`` is negative or not finite.
    """

    factors: tuple[float, ...] = (1.0, 1.0, 2.5)
    """One per worker, in worker order."""
    iteration_s: float = 0.05

    def __post_init__(self) -> None:
        # A configuration gives a list; a tuple keeps the dataclass frozen and hashable.
        if isinstance(self.factors, str) or not isinstance(self.factors, Iterable):
            raise UserError(
                f"straggler.factors is {self.factors!r}; allowed is a list with one number per worker"
            )
        object.__setattr__(self, "factors", tuple(self.factors))
        for factor in self.factors:
            _require_not_negative("straggler.factors", factor)
        _require_not_negative("straggler.iteration_s", self.iteration_s)

    def check(self, num_workers: int) -> None:
        """Needs exactly one factor per worker, else UserError: repeating one would be another cluster."""
        if len(self.factors) != num_workers:
            raise UserError(
                f"straggler.factors is {list(self.factors)}: {len(self.factors)} factors for {num_workers}"
                f" workers; give exactly one each, e.g. straggler.factors={_example_factors(num_workers)}"
            )

    def target_s(self, worker: int, iteration: int) -> float:
        """The worker's factor times ``iteration_s``, whatever the iteration."""
        return self.factors[worker] * self.iteration_s


@dataclass(frozen=True)
class RandomPauses:
    """Each iteration takes ``iteration_s`` or, with ``probability`` and independently, ``factor`` times that.

    Raises:
        UserError: When ``probability`` is not in 0 .. 1, ``factor`` or ``iteration_s`` is negative or not
            finite, or ``seed`` is not an integer of 0 or more.
    """

    probability: float = 0.1
    factor: float = 5.0
    iteration_s: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        _require_not_negative("straggler.probability", self.probability)
        if self.probability > 1:
            raise UserError(f"straggler.probability is {self.probability}; allowed is 0 to 1")
        _require_not_negative("straggler.factor", self.factor)
        _require_not_negative("straggler.iteration_s", self.iteration_s)
        _require_integer("straggler.seed", self.seed, least=0)

    def check(self, num_workers: int) -> None:
        """Fits every run."""

    def target_s(self, worker: int, iteration: int) -> float:
        """Long or short by a number drawn from (seed, worker, iteration)."""
        is_paused = _uniform(self.seed, worker, iteration) < self.probability
        return (self.factor if is_paused else 1.0) * self.iteration_s


@dataclass(frozen=True)
class Rotating:
    """One worker after the other is slow, each for ``period`` iterations; in the long run all are equal.

    Every worker counts its own iterations. Where workers run in step (BSP) exactly one is slow at a time;
    where they run apart their turns may overlap for a while.

    Raises:
        UserError: When ``num_workers`` or ``period`` is not a positive integer, or ``factor`` or
            ``iteration_s`` is negative or not finite.
    """

    num_workers: int = 3
    """How many workers take turns: those of the run."""
    period: int = 20
    """Length of a turn, iterations."""
    factor: float = 4.0
    iteration_s: float = 0.05

    def __post_init__(self) -> None:
        _require_integer("straggler.num_workers", self.num_workers, least=1)
        _require_integer("straggler.period", self.period, least=1)
        _require_not_negative("straggler.factor", self.factor)
        _require_not_negative("straggler.iteration_s", self.iteration_s)

    def check(self, num_workers: int) -> None:
        """Needs the run's number of workers, else UserError."""
        if self.num_workers != num_workers:
            raise UserError(
                f"straggler.num_workers is {self.num_workers}, but the run has {num_workers} workers; set"
                f" straggler.num_workers={num_workers}"
            )

    def target_s(self, worker: int, iteration: int) -> float:
        """``factor * iteration_s`` during the worker's turn, else ``iteration_s``."""
        is_slow = iteration // self.period % self.num_workers == worker
        return (self.factor if is_slow else 1.0) * self.iteration_s


@dataclass(frozen=True)
class LongStall:
    """All are equally fast, and one worker stands still once: ``duration_s`` is added to a single iteration.

    Raises:
        UserError: When ``worker`` or ``at_iteration`` is not an integer of 0 or more, or a time is negative
            or not finite.
    """

    worker: int = 0
    at_iteration: int = 50
    """The stalled worker's own count of iterations, from 0."""
    duration_s: float = 3.0
    iteration_s: float = 0.05

    def __post_init__(self) -> None:
        _require_integer("straggler.worker", self.worker, least=0)
        _require_integer("straggler.at_iteration", self.at_iteration, least=0)
        _require_not_negative("straggler.duration_s", self.duration_s)
        _require_not_negative("straggler.iteration_s", self.iteration_s)

    def check(self, num_workers: int) -> None:
        """The stalled worker must be one of the run's, else UserError."""
        if self.worker >= num_workers:
            raise UserError(
                f"straggler.worker is {self.worker}; allowed is 0 to {num_workers - 1}"
                f" (the run has {num_workers} workers)"
            )

    def target_s(self, worker: int, iteration: int) -> float:
        """``iteration_s``, and ``duration_s`` more for the one stalled iteration."""
        is_stalled = worker == self.worker and iteration == self.at_iteration
        return self.iteration_s + (self.duration_s if is_stalled else 0.0)


def _uniform(seed: int, worker: int, iteration: int) -> float:
    """A number in [0, 1), a function of its arguments alone, the same in every process and Python version."""
    digest = hashlib.blake2b(f"{seed}/{worker}/{iteration}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: what a float can hold exactly


def _example_factors(num_workers: int) -> str:
    return "[" + ",".join(["1"] * (num_workers - 1) + ["2.5"]) + "]"


def _require_not_negative(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise UserError(f"{key} has the value {value!r}; allowed are finite numbers of 0 or more")


def _require_integer(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{key} has the value {value!r}; allowed are integers of {least} or more")
