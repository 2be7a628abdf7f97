"""Deals batch ranges to workers as they are released.

Pure: knows numbers of samples only. The order of samples within an epoch, and loading them, is not its business. Two
dealers behind one protocol: ranges from one stock for all (``RangeDealer``), or from a shard of each worker's own
(``ShardDealer``, as in the papers).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Protocol

from hydssp.errors import UserError


@dataclass(frozen=True)
class BatchRange:
    """The batch of one iteration: positions ``start`` .. ``start + count - 1`` of the order of ``epoch``."""

    epoch: int
    start: int
    count: int
    """Samples in the batch; 0: push an empty gradient."""


class Dealer(Protocol):
    """Deals the ranges of one run."""

    def deal(self, workers: Iterable[int]) -> dict[int, BatchRange | None]:
        """The next range for each of ``workers``.

        Args:
            workers: Released workers, in the order of their release, each once. With rounds: all of the round.

        Returns:
            Worker -> its range, in the order given; None: nothing is left for it, it should finish.
        """

    def has_more(self, worker: int) -> bool:
        """Whether a range can still come for ``worker``; if not, its next push is its last."""

    def upcoming(self, worker: int) -> BatchRange | None:
        """The range that ``worker`` will most likely get next; only a hint, for loading ahead."""


def _run_length(num_epochs: float | None, num_samples: int) -> int | None:
    """Samples in a run of ``num_epochs``, the last one cut at ``ceil(fraction * num_samples)``; None: endless."""
    if num_epochs is None:
        return None
    # As written in decimal: in binary 1.1 - 1 is a little more than a tenth, and ceil would add a sample.
    length = Fraction(str(num_epochs))
    whole = math.floor(length)
    return whole * num_samples + math.ceil((length - whole) * num_samples)


def _check_numbers(num_samples: int, batch_size: int, num_epochs: float | None) -> None:
    if num_samples < 1:
        raise UserError(f"data: {num_samples} samples: must be at least 1; check the data set and its path")
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: must be an integer >= 1; give a positive batch size")
    if num_epochs is not None and not 0 < num_epochs < math.inf:
        raise UserError(
            f"epochs={num_epochs}: must be a number > 0; give a positive number, fractions allowed"
        )


class RangeDealer:
    """Deals every sample of an epoch exactly once over all workers, whatever their speeds.

    Without rounds the ranges follow one another without a gap, and the last batch of an epoch may be smaller. With
    rounds (for paradigms that apply per round) one call deals one round, a round does not cross an epoch, and a
    worker for which the epoch's last round has no samples left gets an empty range.

    With ``lookahead`` each dealt worker's next range is set aside for it. A range set aside for a slow worker is taken
    back when another would otherwise have none, so that lookahead changes who gets a range but never whether.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        num_epochs: float | None = None,
        rounds: bool = False,
        lookahead: bool = False,
    ) -> None:
        """Start before the first sample of epoch 0.

        Args:
            num_samples: Samples in one epoch, >= 1.
            batch_size: Samples in one full batch, >= 1; the whole epoch if that is smaller.
            num_epochs: Length of the run in epochs, > 0, may be fractional (the last epoch then ends after
                ``ceil(fraction * num_samples)`` samples); None: endless.
            rounds: Whether each call of ``deal`` is one round.
            lookahead: Whether the ranges after these are set aside.

        Raises:
            UserError: If a number is out of range.
        """
        _check_numbers(num_samples, batch_size, num_epochs)
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._rounds = rounds
        self._lookahead = lookahead
        self._total = _run_length(num_epochs, num_samples)
        self._dealt = 0
        self._set_aside: dict[int, BatchRange | None] = {}  # oldest first
        self._round_begins_at = (
            0  # where dealing goes back to when the round set aside is not the one that comes
        )

    @property
    def samples_dealt(self) -> int:
        """Samples in all ranges dealt so far; those set aside are not dealt."""
        return self._dealt - sum(r.count for r in self._set_aside.values() if r is not None)

    @property
    def exhausted(self) -> bool:
        """Whether no sample of the run is left to deal: the next push of every worker is then its last."""
        return self._dealt == self._total and not self._set_aside

    def has_more(self, worker: int) -> bool:
        """See ``Dealer``; the same for every worker."""
        return not self.exhausted

    def upcoming(self, worker: int) -> BatchRange | None:
        """See ``Dealer``; None without lookahead."""
        return self._set_aside.get(worker)

    def deal(self, workers: Iterable[int]) -> dict[int, BatchRange | None]:
        """See ``Dealer``."""
        workers = list(workers)
        if self._rounds:
            return self._deal_round(workers)
        dealt = {worker: self._one_for(worker) for worker in workers}
        if self._lookahead:
            for worker in workers:
                following = self._next()
                if following is not None:
                    self._set_aside[worker] = following
        return dealt

    def _one_for(self, worker: int) -> BatchRange | None:
        own = self._set_aside.pop(worker, None) or self._next()
        if own is None and self._set_aside:
            own = self._set_aside.pop(
                next(iter(self._set_aside))
            )  # of the one that has not come for the longest time
        return own

    def _next(self) -> BatchRange | None:
        if self._dealt == self._total:
            return None
        epoch, start = divmod(self._dealt, self._num_samples)
        count = min(self._batch_size, self._num_samples - start)
        if self._total is not None:
            count = min(count, self._total - self._dealt)
        self._dealt += count
        return BatchRange(epoch, start, count)

    def _deal_round(self, workers: list[int]) -> dict[int, BatchRange | None]:
        if list(self._set_aside) == workers:
            dealt = dict(self._set_aside)
        else:
            if self._set_aside:
                self._dealt = self._round_begins_at
            dealt = self._round_for(workers)
        self._set_aside = {}
        if self._lookahead and self._dealt != self._total:
            self._round_begins_at = self._dealt
            self._set_aside = self._round_for(workers)
        return dealt

    def _round_for(self, workers: list[int]) -> dict[int, BatchRange | None]:
        if self._dealt == self._total:
            return dict.fromkeys(workers)
        epoch, start = divmod(self._dealt, self._num_samples)
        dealt: dict[int, BatchRange | None] = {}
        for worker in workers:
            is_over = self._dealt == self._total or self._dealt // self._num_samples != epoch
            following = None if is_over else self._next()
            if following is not None:
                start = following.start + following.count
            dealt[worker] = following or BatchRange(epoch, start, 0)
        return dealt


class ShardDealer:
    """Deals to every worker the samples of its own shard, as the papers on SSP and DSSP partition the data.

    Shard w holds the positions ``w*n//P`` to ``(w+1)*n//P`` of every epoch, and each worker goes through its own at its
    own pace: a fast worker finishes early. With rounds all workers are in the same epoch, and one whose shard is used
    up pushes empty until the others are through.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        num_epochs: float | None,
        num_workers: int,
        rounds: bool = False,
    ) -> None:
        """Start before every shard's first sample.

        Args:
            num_samples: Samples in one epoch of all shards, >= 1.
            batch_size: Samples in one full batch, >= 1.
            num_epochs: Length of the run, > 0; None: endless.
            num_workers: P, the number of shards.
            rounds: Whether each call of ``deal`` is one round.

        Raises:
            UserError: If a number is out of range, or there are fewer samples than workers.
        """
        _check_numbers(num_samples, batch_size, num_epochs)
        if num_samples < num_workers:
            raise UserError(
                f"data.sharding=static: {num_samples} samples cannot be shared by {num_workers} workers; use dynamic"
            )
        bounds = [worker * num_samples // num_workers for worker in range(num_workers + 1)]
        self._starts = bounds[:-1]
        self._sizes = [stop - start for start, stop in pairwise(bounds)]
        self._totals = [_run_length(num_epochs, size) for size in self._sizes]
        self._batch_size = batch_size
        self._rounds = rounds
        self._dealt = [0] * num_workers

    def has_more(self, worker: int) -> bool:
        """See ``Dealer``."""
        if self._rounds:
            return any(d != total for d, total in zip(self._dealt, self._totals, strict=True))
        return self._dealt[worker] != self._totals[worker]

    def upcoming(self, worker: int) -> BatchRange | None:
        """See ``Dealer``."""
        return self._next(worker)

    def deal(self, workers: Iterable[int]) -> dict[int, BatchRange | None]:
        """See ``Dealer``."""
        workers = list(workers)
        dealt: dict[int, BatchRange | None] = {}
        if self._rounds and not self.has_more(0):
            return dict.fromkeys(workers)
        epoch = min(d // size for d, size in zip(self._dealt, self._sizes, strict=True))
        for worker in workers:
            following = self._next(worker)
            if self._rounds and (following is None or following.epoch > epoch):
                following = BatchRange(epoch, self._starts[worker] + self._sizes[worker], 0)
            dealt[worker] = following
            if following is not None:
                self._dealt[worker] += following.count
        return dealt

    def _next(self, worker: int) -> BatchRange | None:
        total, dealt, size = self._totals[worker], self._dealt[worker], self._sizes[worker]
        if dealt == total:
            return None
        epoch, start = divmod(dealt, size)
        count = min(self._batch_size, size - start)
        if total is not None:
            count = min(count, total - dealt)
        return BatchRange(epoch, self._starts[worker] + start, count)
