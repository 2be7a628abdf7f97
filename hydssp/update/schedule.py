"""Learning-rate schedules and the clocks that may drive them. Pure: standard library only.

A schedule maps progress in epochs to a factor on the configured learning rate. What counts as an epoch is the choice
``lr_clock``; ``samples`` (all workers' samples / size of the data) is the only one under which asynchronous and
synchronous runs decay at the same point of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Protocol

from hydssp.errors import UserError


class Schedule(Protocol):
    """A factor on the learning rate as a function of progress."""

    def factor(self, epoch: float) -> float:
        """The factor at ``epoch`` (0.0 at the start of training)."""


@dataclass(frozen=True)
class Constant:
    """The learning rate stays as configured."""

    def factor(self, epoch: float) -> float:
        """Always 1."""
        return 1.0


@dataclass(frozen=True)
class Step:
    """The learning rate is multiplied by ``gamma`` at each of the ``milestones`` (in epochs).

    Raises:
        UserError: When the milestones are not positive and rising, or gamma is not in (0, 1].
    """

    milestones: Sequence[float]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        steps = list(self.milestones)
        if not steps or steps[0] <= 0 or any(a >= b for a, b in pairwise(steps)):
            raise UserError(
                f"schedule.milestones={steps}: allowed is a rising list of positive epochs, e.g. [200,250]"
            )
        if not 0 < self.gamma <= 1:
            raise UserError(f"schedule.gamma={self.gamma}: allowed is a number above 0 and at most 1")

    def factor(self, epoch: float) -> float:
        """``gamma`` to the power of the number of milestones reached."""
        return float(self.gamma ** sum(epoch >= m for m in self.milestones))


def _check(key: str, value: float | None, allowed: str, *, is_right: bool) -> None:
    if not is_right:
        raise UserError(f"{key}={value}: allowed is {allowed}")


def _check_length(epochs: float | None) -> None:
    _check(
        "schedule.epochs",
        epochs,
        "a number above 0, the schedule's length (unless given, the run's, which has none under epochs=null)",
        is_right=epochs is not None and 0 < epochs < math.inf,
    )


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from the full learning rate to ``final`` times it at ``epochs``, where it stays.

    Source: Loshchilov and Hutter 2017, arXiv 1608.03983, without restarts.

    Raises:
        UserError: When ``epochs`` is not positive or ``final`` not in [0, 1].
    """

    epochs: float
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_length(self.epochs)
        _check("schedule.final", self.final, "a number from 0 to 1", is_right=0 <= self.final <= 1)

    def factor(self, epoch: float) -> float:
        """The factor at ``epoch``."""
        return _half_cosine(1.0, self.final, epoch / self.epochs)


@dataclass(frozen=True)
class OneCycle:
    """Half a cosine up from ``start`` to the full learning rate at ``peak_at * epochs``, another down to ``final``.

    The rates of torch's ``OneCycleLR`` with its defaults; momentum is left alone. Source: Smith and Topin 2018, arXiv
    1708.07120.

    Raises:
        UserError: When ``epochs`` is not positive, ``peak_at`` not between 0 and 1, or a factor not in [0, 1].
    """

    epochs: float
    peak_at: float = 0.3
    start: float = 0.04
    final: float = 4e-6

    def __post_init__(self) -> None:
        _check_length(self.epochs)
        _check(
            "schedule.peak_at",
            self.peak_at,
            "a share of epochs above 0 and below 1",
            is_right=0 < self.peak_at < 1,
        )
        _check("schedule.start", self.start, "a number from 0 to 1", is_right=0 <= self.start <= 1)
        _check("schedule.final", self.final, "a number from 0 to 1", is_right=0 <= self.final <= 1)

    def factor(self, epoch: float) -> float:
        """The factor at ``epoch``."""
        peak = self.peak_at * self.epochs
        if epoch < peak:
            return _half_cosine(self.start, 1.0, epoch / peak)
        return _half_cosine(1.0, self.final, (epoch - peak) / (self.epochs - peak))


def _half_cosine(first: float, last: float, share: float) -> float:
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


@dataclass(frozen=True)
class WarmUp:
    """A linear rise from ``start`` to 1 over ``epochs``, on top of another schedule.

    Source: Goyal et al. 2017, arXiv 1706.02677, where it begins at 1/P of a rate that was scaled up by P.

    Raises:
        UserError: When ``epochs`` is not a finite number of at least 0, or ``start`` is not in [0, 1].
    """

    schedule: Schedule
    epochs: float
    start: float

    def __post_init__(self) -> None:
        _check(
            "warmup.epochs",
            self.epochs,
            "a number of at least 0 (0: no warm-up)",
            is_right=0 <= self.epochs < math.inf,
        )
        _check(
            "warmup.start",
            self.start,
            "a number from 0 to 1, or null for 1 / number of workers",
            is_right=0 <= self.start <= 1,
        )

    def factor(self, epoch: float) -> float:
        """The other schedule's factor, less what is missing at ``epoch``."""
        factor = self.schedule.factor(epoch)
        if epoch >= self.epochs:
            return factor
        return factor * (self.start + (1.0 - self.start) * epoch / self.epochs)


class LrClock(Enum):
    """What drives the schedule."""

    samples = "samples"
    server_updates = "server_updates"
    worker_epochs = "worker_epochs"


def schedule_epoch(
    clock: LrClock,
    *,
    samples: int,
    updates: int,
    worker_clock: int,
    batch_size: int,
    num_workers: int,
    num_samples: int,
) -> float:
    """Progress in epochs as ``clock`` counts it.

    ``server_updates`` and ``worker_epochs`` exist to reproduce published settings: the first takes every update for a
    whole round of all workers (so it decays P times too early in an asynchronous run), the second takes the pushing
    worker's clock for everybody's.

    Args:
        clock: Which clock.
        samples: Samples in all updates so far.
        updates: Updates so far.
        worker_clock: Pushes so far of the worker whose gradient is applied.
        batch_size: Samples per push.
        num_workers: P.
        num_samples: Size of the training data.
    """
    if clock is LrClock.samples:
        return samples / num_samples
    rounds = updates if clock is LrClock.server_updates else worker_clock
    return rounds * batch_size * num_workers / num_samples
