"""The embedded data set: 1,797 real handwritten digits of 8x8 pixels.

Reads the one file that lies beside this module. Source, authors and licence: ``digits.LICENSE.txt``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hydssp.data.arrays import ArrayDataset, Splits

NUM_TRAIN = 1437
"""80 % of 1,797; the other 360 are the test images."""
# Of pixel / 16 on the training images.
MEAN = (0.3054,)
STD = (0.3759,)


def digits() -> Splits:
    """Handwritten digits: 1,437 training and 360 test images of shape (1, 8, 8), always the same division.

    One test image is worth 0.28 points of accuracy.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as archive:
        images, labels = archive["images"], archive["labels"].astype(np.int64)
    # RandomState and not default_rng: only the older generator's numbers are promised never to change (NEP
    # 19), and the division must not depend on the numpy version.
    order = np.random.RandomState(0).permutation(len(images))
    images = np.ascontiguousarray(images[order, np.newaxis])
    labels = labels[order]

    def part(chosen: slice) -> ArrayDataset:
        return ArrayDataset(images[chosen], labels[chosen], MEAN, STD, num_classes=10, max_value=16)

    return Splits(train=part(slice(None, NUM_TRAIN)), test=part(slice(NUM_TRAIN, None)))
