"""Small image classifiers, plain ``nn.Sequential`` without batch norm: the parameters are the whole state.

Builds modules and nothing else: draws from torch's global generator (seed it first), chooses no device or
dtype.

Shape suffixes: B batch, C channels, H height, W width, D features, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from hydssp.errors import UserError

LENET_MIN_SIZE = 12
"""Smallest height and width (pixels) of which two 5x5 convolutions and two poolings leave something."""
ALEXNET_SMALL_MIN_SIZE = 8
"""Smallest height and width (pixels) of which three poolings leave something."""


def mlp(input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (64,)) -> nn.Sequential:
    """Multi-layer perceptron with ReLU: ``x_BCHW -> logits_BK``.

    Args:
        input_shape: (C, H, W) of one image.
        num_classes: K, at least 1.
        hidden: Width of each hidden layer; empty: logistic regression.

    Returns:
        The model; 4,810 parameters for (1, 8, 8), 10 classes, hidden (64,).

    Raises:
        UserError: When a width is not a positive integer.
    """
    # Not only the type hint: a configuration may hold anything here, `model.hidden=64` for instance.
    if not isinstance(hidden, Sequence) or not all(type(width) is int and width > 0 for width in hidden):
        raise UserError(
            f"model.hidden is {hidden}; allowed is a list of positive integers, one per hidden layer, e.g."
            " model.hidden=[64], or [] for none"
        )
    widths = [math.prod(input_shape), *hidden, num_classes]
    layers: list[nn.Module] = [nn.Flatten()]  # x_BCHW -> x_BD
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])  # no ReLU on the logits


def lenet(input_shape: Sequence[int], num_classes: int) -> nn.Sequential:
    """LeNet-5 in today's form (ReLU, max pooling): ``x_BCHW -> logits_BK``.

    After LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition, 1998. The
    first convolution pads by 2, so that 28x28 images give the original's feature maps; larger images give
    larger maps and a wider first dense layer.

    Args:
        input_shape: (C, H, W) of one image, H and W at least 12.
        num_classes: K, at least 1.

    Returns:
        The model; 61,706 parameters for (1, 28, 28) and 10 classes.

    Raises:
        UserError: When the images are too small.
    """
    channels, height, width = input_shape
    if min(height, width) < LENET_MIN_SIZE:
        raise UserError(
            f"model=lenet: the images are {height}x{width} pixels; it needs at least"
            f" {LENET_MIN_SIZE}x{LENET_MIN_SIZE}. Use model=mlp, or data with larger images"
        )
    num_features = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, kernel_size=5, padding=2),  # H x W stays
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),  # H and W lose 4
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),  # x_BCHW -> x_BD
        nn.Linear(num_features, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


def alexnet_small(input_shape: Sequence[int], num_classes: int) -> nn.Sequential:
    """Three 5x5 convolutions and two dense layers, AlexNet cut down to CIFAR: ``x_BCHW -> logits_BK``.

    After the CIFAR-10 networks of Krizhevsky's cuda-convnet, with max pooling throughout and without local response
    normalisation.

    Args:
        input_shape: (C, H, W) of one image, H and W at least 8.
        num_classes: K, at least 1.

    Returns:
        The model; 145,578 parameters for (3, 32, 32) and 10 classes.

    Raises:
        UserError: When the images are too small.
    """
    channels, height, width = input_shape
    if min(height, width) < ALEXNET_SMALL_MIN_SIZE:
        raise UserError(
            f"model=alexnet_small: the images are {height}x{width} pixels; it needs at least"
            f" {ALEXNET_SMALL_MIN_SIZE}x{ALEXNET_SMALL_MIN_SIZE}. Use model=mlp, or data with larger images"
        )
    layers: list[nn.Module] = []
    for width_in, width_out in ((channels, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(width_in, width_out, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    num_features = 64 * (height // 8) * (width // 8)
    return nn.Sequential(
        *layers,
        nn.Flatten(),  # x_BCHW -> x_BD
        nn.Linear(num_features, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )
