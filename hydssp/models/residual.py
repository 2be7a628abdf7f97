"""Residual networks for small images, of He, Zhang, Ren, Sun: Deep residual learning, arXiv 1512.03385, section 4.2.

Builds modules and nothing else: draws from torch's global generator (seed it first), chooses no device or dtype.

Shape suffixes: B batch, C channels, H height, W width, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hydssp.errors import UserError

WIDTHS = (16, 32, 64)
NUM_GROUPS = 8
"""Of group normalisation; divides every width."""

_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(NUM_GROUPS, channels),
}


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around which the input goes, through a 1x1 convolution where the shape changes."""

    def __init__(
        self, channels_in: int, channels: int, stride: int, make_norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, kernel_size=3, stride=stride, padding=1, bias=False),
            make_norm(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
            make_norm(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, kernel_size=1, stride=stride, bias=False),
                make_norm(channels),
            )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """The block's output, relu(body(x) + shortcut(x))."""
        return torch.relu(self.body(x_BCHW) + self.shortcut(x_BCHW))


def resnet(
    input_shape: Sequence[int], num_classes: int, depth: int = 20, norm: str = "batch"
) -> nn.Sequential:
    """Three-stage residual network for CIFAR-sized images: ``x_BCHW -> logits_BK``.

    ``depth=50`` is the network of this family, with 0.76 million parameters, not ImageNet's ResNet-50. Shortcuts that
    change the shape are 1x1 convolutions (the paper's option B), so that it is slightly larger than with the paper's
    own, which have no parameters.

    Args:
        input_shape: (C, H, W) of one image; any size.
        num_classes: K, at least 1.
        depth: Layers with weights on the longest way: 6n + 2, e.g. 8, 20, 32, 44, 50, 56, 110.
        norm: ``batch`` (running statistics in buffers) or ``group`` (the same parameters, no buffers, and nothing
            that depends on the other samples of the batch).

    Returns:
        The model; 272,474 parameters and 1,589 buffer elements for 3 channels, 10 classes and depth 20.

    Raises:
        UserError: When ``depth`` is not 6n + 2 with n of at least 1, or ``norm`` is unknown.
    """
    if type(depth) is not int or depth < 8 or depth % 6 != 2:
        raise UserError(
            f"model.depth is {depth!r}; allowed is 6n + 2: 8, 14, 20, 26, 32, 38, 44, 50, 56, ..., 110"
        )
    if norm not in _NORMS:
        raise UserError(f"model.norm is {norm!r}; allowed is {', '.join(_NORMS)}")
    make_norm, channels = _NORMS[norm], WIDTHS[0]
    layers: list[nn.Module] = [
        nn.Conv2d(input_shape[0], channels, kernel_size=3, padding=1, bias=False),
        make_norm(channels),
        nn.ReLU(),
    ]
    for stage, width in enumerate(WIDTHS):
        for block in range((depth - 2) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(ResidualBlock(channels, width, stride, make_norm))
            channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
