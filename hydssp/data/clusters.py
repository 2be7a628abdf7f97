"""A data set without any file: Gaussian clusters of any shape and size, for latency and scaling runs.

Draws from a generator of its own, seeded by an argument; numpy only. Every rank makes the same arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hydssp.data.arrays import ArrayDataset, Splits
from hydssp.errors import UserError

GREY = 128
NOISE = 40.0
"""Mean and standard deviation of a pixel, in steps of 1/255."""
_BLOCK = 4
_CHUNK = 1024


def synthetic(
    shape: Sequence[int] = (3, 32, 32),
    num_classes: int = 10,
    num_samples: int = 10_000,
    num_test: int = 2_000,
    seed: int = 0,
    separation: float = 8.0,
) -> Splits:
    """Images around one random centre per class, with Gaussian noise on every pixel.

    A centre is made of blocks of 4x4 equal pixels, so that convolutions have something to find.

    Args:
        shape: (C, H, W) of one image.
        num_classes: At least 1.
        num_samples: Training images; classes take turns, so that all are equally frequent.
        num_test: Test images.
        seed: Of centres and noise; the same seed gives the same images.
        separation: Mean distance of two centres in standard deviations of the noise, whatever the shape. With 8, next
            to no image lies nearer to a wrong centre; with 2, one in six does (of two classes).

    Raises:
        UserError: When an argument is out of range.
    """
    if not isinstance(shape, Sequence) or len(shape) != 3 or not all(_is_count(n) for n in shape):
        raise UserError(f"data.shape is {shape!r}; allowed are three positive integers, e.g. [3,32,32]")
    sizes = {"num_classes": num_classes, "num_samples": num_samples, "num_test": num_test}
    for key, value in sizes.items():
        if not _is_count(value):
            raise UserError(f"data.{key} is {value!r}; allowed is a positive integer")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"data.seed is {seed!r}; allowed is an integer from 0")
    if (
        isinstance(separation, bool)
        or not isinstance(separation, int | float)
        or not 0 <= separation < math.inf
    ):
        raise UserError(f"data.separation is {separation!r}; allowed is a number of at least 0")
    rng = np.random.default_rng(seed)
    channels, height, width = shape
    coarse = rng.standard_normal(
        (num_classes, channels, -(-height // _BLOCK), -(-width // _BLOCK)), dtype=np.float32
    )
    centres = coarse.repeat(_BLOCK, axis=2).repeat(_BLOCK, axis=3)[:, :, :height, :width]
    # Two independent centres whose D pixels have standard deviation t lie about t * sqrt(2 D) apart.
    centres = GREY + centres * np.float32(separation * NOISE / math.sqrt(2 * math.prod(shape)))

    def part(count: int) -> ArrayDataset:
        labels = np.arange(count, dtype=np.int64) % num_classes
        images = np.empty((count, *shape), np.uint8)
        for start in range(
            0, count, _CHUNK
        ):  # in chunks: floats of all images would take four times the memory
            chosen = centres[labels[start : start + _CHUNK]]
            noise = rng.standard_normal(chosen.shape, dtype=np.float32)
            images[start : start + _CHUNK] = np.rint(np.clip(chosen + NOISE * noise, 0, 255))
        mean, std = (GREY / 255,) * channels, (NOISE / 255,) * channels
        return ArrayDataset(images, labels, mean, std, num_classes)

    return Splits(train=part(num_samples), test=part(num_test))


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
