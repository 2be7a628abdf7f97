"""Augmentation of training images: pad and crop at random, flip at random.

What happens to a sample depends on seed, epoch and sample number alone, never on who asks or in which batch: every
number is a hash of the three. So the values are the same with any number of loader processes and workers, and a
reclaimed range comes out the same at another worker. Works on bytes with numpy, so that a loader process need not
import torch. Draws from no generator.

Shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hydssp.errors import UserError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Augment:
    """Random shifts by up to ``pad`` pixels, the gap filled with zeros (black), and random mirroring.

    Raises:
        UserError: When a value is of the wrong type or range.
    """

    pad: int = 0
    flip: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.pad) is not int or self.pad < 0:
            raise UserError(f"data.augment.pad is {self.pad!r}; allowed is an integer from 0 (pixels)")
        if type(self.flip) is not bool:
            raise UserError(f"data.augment.flip is {self.flip!r}; allowed is true or false")

    @classmethod
    def from_config(cls, node: Mapping[str, Any] | None, seed: int) -> Augment | None:
        """The augmentation that ``data.augment`` names; None: none.

        Raises:
            UserError: When ``node`` is neither null nor a mapping with ``pad`` and ``flip``.
        """
        if node is None:
            return None
        if not isinstance(node, Mapping) or not set(node) <= {"pad", "flip"}:
            raise UserError(
                f"data.augment is {node!r}; allowed is null, or a mapping with pad (pixels) and flip, e.g."
                " 'data.augment={pad:4,flip:true}'"
            )
        return cls(**node, seed=seed)

    def apply(self, x_BCHW: np.ndarray, indices: np.ndarray, epoch: int) -> np.ndarray:  # noqa: N803
        """Augment a batch.

        Args:
            x_BCHW: The images, any dtype; left as they are.
            indices: Integers [B], the number of each image in the data set.
            epoch: From 0.

        Returns:
            Images of the same shape and dtype; may be ``x_BCHW`` itself where nothing is to be done.
        """
        if not len(x_BCHW):
            return x_BCHW
        sample = _hash(_hash(np.uint64(self.seed), np.uint64(epoch)), indices.astype(np.uint64))
        if self.pad:
            pad, (height, width) = self.pad, x_BCHW.shape[2:]
            shifts = np.uint64(2 * pad + 1)
            top = (_hash(sample, np.uint64(1)) % shifts).astype(np.intp)
            left = (_hash(sample, np.uint64(2)) % shifts).astype(np.intp)
            padded = np.pad(x_BCHW, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
            windows = sliding_window_view(padded, (height, width), axis=(2, 3))  # [B, C, 2p+1, 2p+1, H, W]
            x_BCHW = windows[np.arange(len(padded)), :, top, left]  # noqa: N806
        if self.flip:
            mirrored = (_hash(sample, np.uint64(3)) >> np.uint64(63)).astype(bool)
            x_BCHW = x_BCHW.copy()  # noqa: N806
            x_BCHW[mirrored] = x_BCHW[mirrored][..., ::-1]
        return np.ascontiguousarray(x_BCHW)


def _hash(state: np.ndarray | np.uint64, number: np.ndarray | np.uint64) -> np.ndarray:
    """Mix ``number`` into ``state``, all uint64: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        mixed = (np.asarray(state) ^ np.asarray(number)) + _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        return np.asarray(mixed)
