"""The two small fixed-size messages between server and workers, and their binary form.

Imports numpy and the standard library only. Clock message: worker -> server, one per push. Grant: server ->
worker, one per release and one to say stop. No pickling: each is one record of a numpy structured dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

import numpy as np


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
    is_skipped: bool = False
    """The gradient in float16 overflowed and was not put: no fault, the worker goes on with a smaller loss scale. Then
    ``is_finite`` is False, too."""
    pull_retries: int = 0
    """How often the pull had to begin again because its slot of the ring was overwritten."""
    data_s: float = 0.0
    pull_s: float = 0.0
    compute_s: float = 0.0
    """Forward and backward, with the straggler's padding."""
    push_s: float = 0.0
    """How long the put took. The transport measures it: what the caller gives is not sent."""
    cpu_s: float = 0.0
    """Processor time that the worker's process has used so far."""
    memory_bytes: int = 0
    """Its resident memory at present."""
    device_bytes: int = 0
    """Memory that its tensors hold on the GPU; 0 without one."""
    stop_code: int = 0
    """Exit code that a signal to this worker asks for; 0: none came."""


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
    next_epoch: int = 0
    next_start: int = 0
    next_count: int = 0
    """The range that this worker will most likely get next, to be loaded ahead; count 0: not known. Only the grant
    itself binds."""
    lr_factor: float = 1.0
    """The schedule's factor on the learning rate, for steps that the worker makes by itself."""


class Stamps(NamedTuple):
    """The three times that travel with a clock message."""

    granted_at: float
    """When the worker saw its grant, on the worker's clock."""
    pushed_at: float
    """When the worker had finished its put, on the worker's clock."""
    grant_sent_at: float
    """When the server sent the grant, on the server's clock: echoed."""


_KINDS = {"int": "i8", "bool": "i8", "float": "f8"}
_CLOCK_FIELDS = [field.name for field in fields(Clock)]
_GRANT_FIELDS = [field.name for field in fields(Grant)]
_clock_values, _grant_values = attrgetter(*_CLOCK_FIELDS), attrgetter(*_GRANT_FIELDS)

CLOCK_DTYPE = np.dtype(
    [(f.name, _KINDS[str(f.type)]) for f in fields(Clock)] + [(name, "f8") for name in Stamps._fields]
)
"""A clock message: the fields of ``Clock``, then those of ``Stamps``."""
GRANT_DTYPE = np.dtype([(f.name, _KINDS[str(f.type)]) for f in fields(Grant)] + [("sent_at", "f8")])
"""A grant: the fields of ``Grant``, then when the server sent it."""

_PUSH_S = _CLOCK_FIELDS.index("push_s")
_CLOCK_FLAGS = [place for place, field in enumerate(fields(Clock)) if str(field.type) == "bool"]
_STOP = _GRANT_FIELDS.index("stop")


def write_clock(record: np.ndarray, clock: Clock, stamps: Stamps, push_s: float) -> None:
    """Write a clock message into ``record``, shape (1,), ``CLOCK_DTYPE``; ``push_s`` replaces the clock's."""
    values = list(_clock_values(clock))
    values[_PUSH_S] = push_s
    record[0] = (*values, *stamps)


def read_clock(record: np.ndarray) -> tuple[Clock, Stamps]:
    """Inverse of ``write_clock``; keeps no reference to ``record``."""
    values = list(record[0].item())
    for place in _CLOCK_FLAGS:
        values[place] = bool(values[place])
    return Clock(*values[: len(_CLOCK_FIELDS)]), Stamps(*values[len(_CLOCK_FIELDS) :])


def write_grant(record: np.ndarray, grant: Grant, sent_at: float) -> None:
    """Write a grant, sent at server time ``sent_at``, into ``record``, shape (1,), ``GRANT_DTYPE``."""
    record[0] = (*_grant_values(grant), sent_at)


def read_grant(record: np.ndarray) -> tuple[Grant, float]:
    """Inverse of ``write_grant``: the grant and when it was sent."""
    *values, sent_at = record[0].item()
    values[_STOP] = bool(values[_STOP])
    return Grant(*values), sent_at
