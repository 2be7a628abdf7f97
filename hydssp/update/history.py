"""Old weights for as long as a gradient may arrive that was computed from them.

One job: keep one copy of each version that a computing worker was granted, and find it again by staleness. Knows no
transport, no optimizer and no formula. Versions are counted from 0 by the updates that this object is told of.

A version is copied when the next update is about to overwrite it, chunk by chunk while that update has it in cache
anyway, and only if a worker that is not in this update still computes on it. So one worker alone, or workers in
rounds, cost no copy at all, and P workers at most P: a version is given up with the last worker that was granted it.
"""

from __future__ import annotations

import torch


class VersionHistory:
    """The weights as they are (not held here) and copies of older versions.

    Attributes:
        version: Updates so far.
        num_approximated: Gradients whose own version was not kept, so that the nearest one stood for it. This happens
            when a pull found its slot of the ring overwritten and read a newer version than the granted one.

    Args:
        weights: The vector that the updates change in place, 1-D; copies have its size and dtype.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self.version = 0
        self.num_approximated = 0
        self._weights = weights
        self._granted: dict[int, int] = {}
        self._num_computing: dict[int, int] = {}
        """By version: workers that were granted it and have not been in an update since."""
        self._copies: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []
        self._being_copied: torch.Tensor | None = None

    @property
    def num_copies(self) -> int:
        """Copies allocated so far, each as large as the weights."""
        return len(self._copies) + len(self._free)

    def granted(self, worker: int) -> None:
        """``worker`` computes its next gradient from the weights as they are now."""
        self._release(worker)
        self._granted[worker] = self.version
        self._num_computing[self.version] = self._num_computing.get(self.version, 0) + 1

    def used(self, staleness: int) -> tuple[torch.Tensor | None, bool]:
        """The weights of ``staleness`` versions ago.

        Returns:
            The copy, or None for the weights as they are; and whether it is that very version and not the nearest one
            (of two equally near ones the older, which overstates the gap).
        """
        version = self.version - staleness
        if staleness == 0:
            return None, True
        if version in self._copies:
            return self._copies[version], True
        self.num_approximated += 1
        nearest = min([*self._copies, self.version], key=lambda v: (abs(v - version), v))
        return self._copies.get(nearest), False

    def begin_update(self, workers: list[int]) -> None:
        """An update from the gradients of ``workers`` begins; each chunk goes to its ``room`` before its change."""
        mine = sum(self._granted.get(w) == self.version for w in workers)
        if self._num_computing.get(self.version, 0) > mine:
            self._being_copied = self._free.pop() if self._free else torch.empty_like(self._weights)

    def room(self, start: int, stop: int) -> torch.Tensor | None:
        """Where elements ``[start, stop)`` are to be copied before they change; None: nobody needs this version."""
        return None if self._being_copied is None else self._being_copied[start:stop]

    def end_update(self, workers: list[int]) -> None:
        """The update is made; ``workers`` compute no more on what they were granted."""
        if self._being_copied is not None:
            self._copies[self.version] = self._being_copied
            self._being_copied = None
        self.version += 1
        for worker in workers:
            self._release(worker)

    def _release(self, worker: int) -> None:
        version = self._granted.pop(worker, None)
        if version is None:
            return
        self._num_computing[version] -= 1
        if not self._num_computing[version]:
            del self._num_computing[version]
            if version in self._copies:
                self._free.append(self._copies.pop(version))
