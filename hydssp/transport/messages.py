"""The two small fixed-size messages between server and workers, and their binary form.

Imports numpy and the standard library only. Clock message: worker -> server, one per push. Grant: server ->
worker, one per release and one to say stop. No pickling: each is one record of a numpy structured dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CLOCK_DTYPE = np.dtype(
    [
        ("iteration", "i8"),
        ("version", "i8"),
        ("samples", "i8"),
        ("correct", "i8"),
        ("pull_retries", "i8"),
        ("is_finite", "i8"),
        ("loss", "f8"),
        ("granted_at", "f8"),
        ("pushed_at", "f8"),
        ("data_s", "f8"),
        ("pull_s", "f8"),
        ("compute_s", "f8"),
        ("push_s", "f8"),
        ("grant_sent_at", "f8"),
    ]
)
GRANT_DTYPE = np.dtype(
    [
        ("iteration", "i8"),
        ("version", "i8"),
        ("epoch", "i8"),
        ("start", "i8"),
        ("count", "i8"),
        ("stop", "i8"),
        ("sent_at", "f8"),
    ]
)


@dataclass(frozen=True)
class Clock:
    """What a worker says with a push. Durations are plain seconds."""

    iteration: int
    """Number of this iteration of this worker, from 0; echoes the grant."""
    version: int
    """Version of the weights that the gradient was computed from, as really read."""
    samples: int
    """Samples in the batch; 0 is an empty push (nothing was put)."""
    correct: int = 0
    """How many of them the model classified right; -1 where that has no meaning."""
    loss: float = float("nan")
    """Mean loss of the batch."""
    is_finite: bool = True
    """False: loss or gradient contains inf or nan; the server must not apply it."""
    pull_retries: int = 0
    """How often the pull had to begin again because its slot of the ring was overwritten."""
    data_s: float = 0.0
    pull_s: float = 0.0
    compute_s: float = 0.0
    """Forward and backward, with the straggler's padding."""
    push_s: float = 0.0
    """How long the put took. The transport measures it: what the caller gives is not sent."""


@dataclass(frozen=True)
class Pushed:
    """A clock message as the server receives it: times are seconds on the *server's* clock."""

    worker: int
    clock: Clock
    granted_at: float
    """When the worker saw its grant."""
    pushed_at: float
    """When the worker had finished its put; never after ``received_at``."""
    received_at: float


@dataclass(frozen=True)
class Grant:
    """The server's OK to start one iteration, or the word to stop."""

    iteration: int
    version: int
    """Version to pull (the newest when the grant was made)."""
    epoch: int = 0
    start: int = 0
    count: int = 0
    """Batch range ``[start, start+count)`` of the epoch's order; count 0: push an empty gradient."""
    stop: bool = False
    """No further iteration: leave the loop and close the transport."""


class Stamps(NamedTuple):
    """The three times that travel with a clock message."""

    granted_at: float
    """When the worker saw its grant, on the worker's clock."""
    pushed_at: float
    """When the worker had finished its put, on the worker's clock."""
    grant_sent_at: float
    """When the server sent the grant, on the server's clock: echoed."""


def write_clock(record: np.ndarray, clock: Clock, stamps: Stamps, push_s: float) -> None:
    """Write a clock message into ``record``, shape (1,), ``CLOCK_DTYPE``; ``push_s`` replaces the clock's."""
    record[0] = (
        clock.iteration,
        clock.version,
        clock.samples,
        clock.correct,
        clock.pull_retries,
        clock.is_finite,
        clock.loss,
        stamps.granted_at,
        stamps.pushed_at,
        clock.data_s,
        clock.pull_s,
        clock.compute_s,
        push_s,
        stamps.grant_sent_at,
    )


def read_clock(record: np.ndarray) -> tuple[Clock, Stamps]:
    """Inverse of ``write_clock``; keeps no reference to ``record``."""
    (
        iteration,
        version,
        samples,
        correct,
        pull_retries,
        is_finite,
        loss,
        granted_at,
        pushed_at,
        data_s,
        pull_s,
        compute_s,
        push_s,
        grant_sent_at,
    ) = record[0].item()
    clock = Clock(
        iteration=iteration,
        version=version,
        samples=samples,
        correct=correct,
        loss=loss,
        is_finite=bool(is_finite),
        pull_retries=pull_retries,
        data_s=data_s,
        pull_s=pull_s,
        compute_s=compute_s,
        push_s=push_s,
    )
    return clock, Stamps(granted_at, pushed_at, grant_sent_at)


def write_grant(record: np.ndarray, grant: Grant, sent_at: float) -> None:
    """Write a grant, sent at server time ``sent_at``, into ``record``, shape (1,), ``GRANT_DTYPE``."""
    record[0] = (
        grant.iteration,
        grant.version,
        grant.epoch,
        grant.start,
        grant.count,
        grant.stop,
        sent_at,
    )


def read_grant(record: np.ndarray) -> tuple[Grant, float]:
    """Inverse of ``write_grant``: the grant and when it was sent."""
    iteration, version, epoch, start, count, stop, sent_at = record[0].item()
    return Grant(iteration, version, epoch, start, count, bool(stop)), sent_at
