"""The map between a module's parameters and one flat vector.

One job: say where each trainable parameter lies in the vector, and bind a module to such vectors. Knows no transport
and no optimizer. Frozen parameters and buffers are not part of the vector; a parameter shared by several modules lies
in it once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hydssp.errors import UserError


@dataclass(frozen=True)
class Span:
    """Where one parameter lies: elements ``[start, stop)`` of the vector."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ParameterLayout:
    """All trainable parameters of a module in the order of ``module.named_parameters()``."""

    spans: tuple[Span, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype = torch.float32) -> ParameterLayout:
        """Lay out the trainable parameters of ``module``.

        Args:
            module: Any module; its own parameter dtype does not matter.
            dtype: Element type of the vector, ``torch.float32`` or ``torch.float64``.

        Raises:
            UserError: When no parameter is trainable, or one is complex, integer or sparse.
        """
        spans, start = [], 0
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            if not parameter.is_floating_point() or parameter.layout != torch.strided:
                raise UserError(
                    f"model: parameter {name!r} is {parameter.dtype}, {parameter.layout}; "
                    "trainable parameters must be dense and of a floating-point type"
                )
            spans.append(Span(name, start, start + parameter.numel(), tuple(parameter.shape)))
            start += parameter.numel()
        if not start:
            raise UserError("model: no trainable parameter; at least one must have requires_grad=True")
        return cls(tuple(spans), dtype)

    @property
    def numel(self) -> int:
        """Elements of the vector."""
        return self.spans[-1].stop

    @property
    def numpy_dtype(self) -> np.dtype:
        """The vector's element type for numpy."""
        return np.dtype({torch.float32: np.float32, torch.float64: np.float64}[self.dtype])

    @property
    def digest(self) -> str:
        """A short hash of names, places and dtype: equal on two ranks iff their vectors mean the same."""
        return hashlib.sha256(repr((self.spans, self.dtype)).encode()).hexdigest()[:16]


class FlatModule:
    """A module whose trainable parameters and gradients are views of two flat vectors.

    Writing into ``weights`` changes the module; ``backward`` accumulates into ``gradient``.

    Attributes:
        module: The module itself, moved to the device and dtype.
        weights: 1-D tensor, ``layout.numel`` elements of ``layout.dtype`` on ``device``.
        gradient: The same for the gradient.
    """

    def __init__(
        self, module: nn.Module, layout: ParameterLayout, device: torch.device | str = "cpu"
    ) -> None:
        self.module = module.to(device=device, dtype=layout.dtype)
        self.layout = layout
        self.weights = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self.gradient = torch.zeros_like(self.weights)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for span in layout.spans:
            parameter = trainable[span.name]
            view = self.weights[span.start : span.stop].view(span.shape)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self.gradient[span.start : span.stop].view(span.shape)

    def zero_gradient(self) -> None:
        """Set the gradient to zero in place, which keeps the parameters' ``.grad`` bound to it."""
        self.gradient.zero_()
