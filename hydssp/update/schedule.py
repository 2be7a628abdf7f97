"""Learning-rate schedules and the clocks that may drive them. Pure: standard library only.

A schedule maps progress in epochs to a factor on the configured learning rate. What counts as an epoch is the choice
``lr_clock``; ``samples`` (all workers' samples / size of the data) is the only one under which asynchronous and
synchronous runs decay at the same point of training.
"""

from __future__ import annotations

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
