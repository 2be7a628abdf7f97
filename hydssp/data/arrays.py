"""The types a data set comes in: images as bytes, labels, and the numbers that normalise them.

Holds and checks arrays, nothing else: reads no file, makes no tensor; numpy only. Images stay uint8 in memory
(a quarter of float32) and are converted batch by batch in ``hydssp.data.batches``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hydssp.errors import UserError


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Labelled images that fit into memory.

    A pixel enters the model as ``(pixel / max_value - mean) / std`` of its channel.

    Raises:
        UserError: When an array has the wrong type, shape or memory order, when a label is outside the
            classes, or when mean and std do not fit the channels.
    """

    images: np.ndarray
    """uint8 [N, C, H, W], C-contiguous; may be read-only (a memory map)."""
    labels: np.ndarray
    """int64 [N], each in 0 .. num_classes-1."""
    mean: tuple[float, ...]
    """Mean of pixel / max_value, one number per channel."""
    std: tuple[float, ...]
    """Standard deviation of pixel / max_value, one positive number per channel."""
    num_classes: int
    max_value: int = 255
    """The pixel value that counts as 1.0."""

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != np.uint8 or images.ndim != 4 or 0 in images.shape:
            raise UserError(
                f"data: images are {images.dtype} of shape {list(images.shape)}; needed is uint8 [N, C, H, W]"
                " with at least one image. Reshape grey images to [N, 1, H, W]"
            )
        if not images.flags.c_contiguous:
            raise UserError("data: images are not C-contiguous; pass numpy.ascontiguousarray(images)")
        if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
            raise UserError(
                f"data: labels are {labels.dtype} of shape {list(labels.shape)}; needed is int64"
                f" [{len(images)}], one label per image"
            )
        if labels.min() < 0 or labels.max() >= self.num_classes:
            raise UserError(
                f"data: labels run from {labels.min()} to {labels.max()}; allowed is 0 to"
                f" {self.num_classes - 1} for {self.num_classes} classes. Number the classes from 0"
            )
        channels = images.shape[1]
        if len(self.mean) != channels or len(self.std) != channels or not all(s > 0 for s in self.std):
            raise UserError(
                f"data: mean {self.mean} and std {self.std} do not fit; needed is one mean and one positive"
                f" std for each of the {channels} channels"
            )
        if self.max_value <= 0:
            raise UserError(
                f"data: max_value is {self.max_value}; it must be positive (255 for ordinary images)"
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one image: (C, H, W)."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def head(self, limit: int | None) -> ArrayDataset:
        """The first ``limit`` samples, as a view; None: all.

        Raises:
            UserError: When ``limit`` is not an integer from 1 to the number of samples.
        """
        if limit is None:
            return self
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= len(self):
            raise UserError(
                f"data.limit is {limit!r}; allowed is 1 to {len(self)} (the training images there are),"
                " or null for all"
            )
        return replace(self, images=self.images[:limit], labels=self.labels[:limit])


@dataclass(frozen=True, eq=False)
class Splits:
    """A data set divided into the part that is trained on and the part that is evaluated on.

    Raises:
        UserError: When the two parts differ in image shape or number of classes.
    """

    train: ArrayDataset
    test: ArrayDataset

    def __post_init__(self) -> None:
        if self.train.shape != self.test.shape or self.train.num_classes != self.test.num_classes:
            raise UserError(
                f"data: training images have shape {self.train.shape} and {self.train.num_classes} classes,"
                f" test images {self.test.shape} and {self.test.num_classes}; both must be the same. Take"
                " both from one data set"
            )


def check_splits(splits: Any) -> None:
    """Check that an object is a data set in two parts: a ``Splits``, or any with map-style parts of the user's.

    Args:
        splits: Has ``train`` and ``test``, each an ``ArrayDataset`` or with ``__len__`` and ``__getitem__``.

    Raises:
        UserError: Naming the part and what it lacks.
    """
    kind = type(splits).__name__
    for name in ("train", "test"):
        part = getattr(splits, name, None)
        if part is None:
            raise UserError(
                f"data: the target gave a {kind} without {name}; needed is an object with train and test, each a"
                " map-style data set, e.g. hydssp.data.Splits or types.SimpleNamespace(train=..., test=...)"
            )
        lacking = [m for m in ("__len__", "__getitem__") if not hasattr(type(part), m)]
        if lacking and not isinstance(part, ArrayDataset):
            raise UserError(
                f"data: {name} is a {type(part).__name__} without {' and '.join(lacking)}; needed is a map-style data"
                " set (samples by number), because the server deals ranges of samples to the workers"
            )
        if len(part) < 1:
            raise UserError(f"data: {name} is empty; at least 1 sample is needed")
