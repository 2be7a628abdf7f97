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
        gradient: 1-D, as it travelled.
        weight: Its factor in the sum.
        staleness: Versions made since the one that it was computed from.
    """

    worker: int
    gradient: np.ndarray
    weight: float
    staleness: int


class Effect(NamedTuple):
    """What a mitigation found out about one gradient; None: it does not need to know.

    Attributes:
        gap: Root mean square, over the elements, of the weights now minus those that the gradient was computed from.
        penalty_mean: Mean over the elements of what the gradient was divided by.
        penalty_max: The largest of them.
        is_exact: False: another version near it stood for the one that was really used.
    """

    gap: float | None = None
    penalty_mean: float | None = None
    penalty_max: float | None = None
    is_exact: bool = True


class Updater(Protocol):
    """What turns gradients into new weights; see ``update.step``."""

    values: np.ndarray
    """The weight vector, 1-D, changed in place."""
    chunk_numel: int
    """Elements worked on at a time, at most."""

    @property
    def learning_rate(self) -> float:
        """As the latest step used it."""

    def granted(self, worker: int) -> None:
        """``worker`` is about to compute a gradient from the weights as they are now."""

    def step(
        self,
        contributions: Sequence[Contribution],
        lr_factor: float,
        after_chunk: Callable[[int, int], None],
    ) -> Sequence[Effect]:
        """One update; calls ``after_chunk(start, stop)`` when these elements are final.

        An empty range (``start == stop``) only says that a chunk's worth of work was done.

        Returns:
            For each contribution what a mitigation knows of it; empty without one.
        """
