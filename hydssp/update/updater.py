"""What the server asks of whatever updates its weights: an interface and its argument, no implementation.

Imports numpy and the standard library only, so that the server's loop needs no torch; ``update.step`` implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Contribution(NamedTuple):
    """One gradient of an update.

    Attributes:
        worker: Whose it is.
        gradient: 1-D, of the layout's dtype.
        weight: Its factor in the sum.
        staleness: Versions made since the one that it was computed from.
    """

    worker: int
    gradient: np.ndarray
    weight: float
    staleness: int


class Updater(Protocol):
    """What turns gradients into new weights; see ``update.step``."""

    values: np.ndarray
    """The weight vector, 1-D, changed in place."""
    chunk_numel: int
    """Elements worked on at a time, at most."""

    @property
    def learning_rate(self) -> float:
        """As the latest step used it."""

    def step(
        self,
        contributions: Sequence[Contribution],
        lr_factor: float,
        after_chunk: Callable[[int, int], None],
    ) -> None:
        """One update; calls ``after_chunk(start, stop)`` when these elements are final."""
