"""What the server asks of whatever evaluates its weights: an interface and its messages, no implementation.

Imports numpy and the standard library only, so that the server's loop needs no torch; ``evaluation`` implements it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True)
class Request:
    """What was pinned: the version, when it was made (seconds, server's clock), and the samples trained on by then."""

    version: int
    pinned_at: float
    samples: int


@dataclass(frozen=True)
class Evaluation:
    """The result for one request: accuracy in 0..1 (nan where it has no meaning) and mean loss per sample."""

    request: Request
    accuracy: float
    loss: float


class Pinned(NamedTuple):
    """Memory for a copy of the weights, 1-D of the layout's dtype, and of the buffers, 1-D float64."""

    weights: np.ndarray
    buffers: np.ndarray


class Evaluator(Protocol):
    """Where the server sends weights to be evaluated."""

    @property
    def is_busy(self) -> bool:
        """The next ``submit`` would have to wait."""

    @property
    def is_ready(self) -> bool:
        """Whether a request would be answered without waiting for a process to start."""

    @property
    def num_pending(self) -> int:
        """Requests without a result so far."""

    @property
    def buffers(self) -> np.ndarray:
        """The buffers that the latest result was computed with, float64."""

    def submit(self, request: Request) -> Pinned:
        """Begin a request while not busy; returns the memory to be filled before ``begin``."""

    def begin(self) -> None:
        """Weights and buffers are in place."""

    def poll(self) -> Evaluation | None:
        """A result when there is one; never blocks."""

    def training_ended(self) -> None:
        """Nobody is disturbed any more."""

    def close(self) -> None:
        """End it; idempotent."""
