"""Deals batch ranges to workers as they are released.

Pure: knows numbers of samples only. The order of samples within an epoch, and loading them, is not its
business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from hydssp.errors import UserError


@dataclass(frozen=True)
class BatchRange:
    """The batch of one iteration: positions ``start`` .. ``start + count - 1`` of the order of ``epoch``."""

    epoch: int
    start: int
    count: int
    """Samples in the batch; 0: push an empty gradient."""


class RangeDealer:
    """Deals every sample of an epoch exactly once over all workers, whatever their speeds.

    State: the epoch and the position in it; changed by ``deal`` only.

    Without rounds the ranges follow one another without a gap, and the last batch of an epoch may be smaller.
    With rounds (for paradigms that apply per round) one call deals one round, a round does not cross an
    epoch, and a worker for which the epoch's last round has no samples left gets an empty range.
    """

    def __init__(
        self, num_samples: int, batch_size: int, num_epochs: float | None = None, rounds: bool = False
    ) -> None:
        """Start before the first sample of epoch 0.

        Args:
            num_samples: Samples in one epoch, >= 1.
            batch_size: Samples in one full batch, >= 1; the whole epoch if that is smaller.
            num_epochs: Length of the run in epochs, > 0, may be fractional (the last epoch then ends after
                ``ceil(fraction * num_samples)`` samples); None: endless.
            rounds: Whether each call of ``deal`` is one round.

        Raises:
            UserError: If a number is out of range.
        """
        if num_samples < 1:
            raise UserError(
                f"data: {num_samples} samples: must be at least 1; check the data set and its path"
            )
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size}: must be an integer >= 1; give a positive batch size")
        if num_epochs is not None and not 0 < num_epochs < math.inf:
            raise UserError(
                f"epochs={num_epochs}: must be a number > 0; give a positive number, fractions allowed"
            )
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._rounds = rounds
        self._total: int | None = None
        if num_epochs is not None:
            # As written in decimal: in binary 1.1 - 1 is a little more than a tenth, and ceil would add a
            # sample.
            length = Fraction(str(num_epochs))
            whole = math.floor(length)
            self._total = whole * num_samples + math.ceil((length - whole) * num_samples)
        self._dealt = 0

    @property
    def samples_dealt(self) -> int:
        """Samples in all ranges dealt so far."""
        return self._dealt

    @property
    def exhausted(self) -> bool:
        """Whether no sample of the run is left to deal: the next push of every worker is then its last."""
        return self._dealt == self._total

    def deal(self, workers: Iterable[int]) -> dict[int, BatchRange | None]:
        """The next range for each of ``workers``.

        Args:
            workers: Released workers, in the order of their release, each once. With rounds: all of the
            round.

        Returns:
            Worker -> its range, in the order given; None: nothing is left in the run, the worker should
            finish.
        """
        epoch = self._dealt // self._num_samples
        dealt: dict[int, BatchRange | None] = {}
        is_over = self.exhausted
        for worker in workers:
            if is_over or (self.exhausted and not self._rounds):
                dealt[worker] = None
                continue
            if not self._rounds:
                epoch = self._dealt // self._num_samples
            start = self._dealt - epoch * self._num_samples
            count = min(self._batch_size, self._num_samples - start)
            if self._total is not None:
                count = min(count, self._total - self._dealt)
            dealt[worker] = BatchRange(epoch, start, count)
            self._dealt += count
        return dealt
