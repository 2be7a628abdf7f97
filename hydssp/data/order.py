"""In which order an epoch goes through the data: one permutation for all ranks, from seed and epoch alone.

Draws no number from a global generator, reads no clock, knows no data. The server deals ranges of the order
(``Grant.epoch``, ``start``, ``count``); any rank can turn a range into indices without a message.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hydssp.errors import UserError


class EpochOrder:
    """Sample indices by (epoch, position).

    Keeps the permutations of the epoch last asked for and of its two neighbours: workers stand on both sides
    of an epoch's end at the same time, and ranges are granted one ahead.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True, num_shards: int = 1) -> None:
        """Fix the order; nothing is computed yet.

        Args:
            num_samples: Size of the data set, at least 1.
            seed: Not negative.
            shuffle: False: every epoch is 0, 1, 2, ….
            num_shards: The positions ``w*n//P`` to ``(w+1)*n//P`` of every epoch hold the same samples, drawn once for
                all epochs, in an order of the epoch's own. 1: any sample may come anywhere.

        Raises:
            UserError: When ``num_samples`` or ``seed`` is out of range.
        """
        if num_samples < 1:
            raise UserError(f"data: the data set has {num_samples} samples; at least 1 is needed to train")
        if seed < 0:
            raise UserError(f"seed is {seed}; it must be 0 or more")
        self.num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        self._bounds = [shard * num_samples // num_shards for shard in range(num_shards + 1)]
        self._permutations: dict[int, np.ndarray] = {}

    def indices(self, epoch: int, start: int, count: int) -> np.ndarray:
        """The samples at positions ``start`` to ``start + count`` of an epoch.

        Args:
            epoch: From 0.
            start: First position, from 0.
            count: How many; 0 gives an empty array.

        Returns:
            int64 [count], read-only.

        Raises:
            IndexError: When the range leaves the epoch.
        """
        if epoch < 0 or start < 0 or count < 0 or start + count > self.num_samples:
            raise IndexError(
                f"epoch {epoch} has {self.num_samples} samples; {start} to {start + count} was asked for"
            )
        return self._permutation(epoch)[start : start + count]

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            epoch = 0  # all epochs are alike: one array is enough
        if epoch not in self._permutations:
            if self._shuffle:
                # spawn_key, and not one seed made of both numbers: streams of different epochs (and of other
                # users of the same seed) are then independent.
                sequence = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
                generator = np.random.default_rng(sequence)
                if len(self._bounds) == 2:
                    permutation = generator.permutation(self.num_samples)
                else:
                    permutation = np.random.default_rng(self._seed).permutation(self.num_samples)
                    for start, stop in pairwise(self._bounds):
                        generator.shuffle(permutation[start:stop])
            else:
                permutation = np.arange(self.num_samples)
            permutation.flags.writeable = False
            for other in [e for e in self._permutations if abs(e - epoch) > 1]:
                del self._permutations[other]
            self._permutations[epoch] = permutation
        return self._permutations[epoch]
