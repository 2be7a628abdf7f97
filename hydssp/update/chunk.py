"""One piece of the weight vector with the optimizer instance that steps it.

One job: the step on this piece, and a hand on the few things in torch's optimizers that a mitigation must reach: the
learning rate, weight decay and the momentum buffer. Decides nothing about gradients.
"""

from __future__ import annotations

from typing import Any

import torch


class Chunk:
    """Elements ``[start, stop)`` of the vector.

    Attributes:
        number: Its place among the chunks.
        start: First element.
        stop: One after the last.
        weights: View of these elements, 1-D.
        initial_lr: The configured learning rate, before any factor.
    """

    def __init__(
        self,
        number: int,
        start: int,
        stop: int,
        parameter: torch.nn.Parameter,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.number = number
        self.start, self.stop = start, stop
        self.weights = parameter.data
        self.initial_lr = float(optimizer.param_groups[0]["lr"])
        self._parameter, self._optimizer = parameter, optimizer

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's options for this chunk, as torch keeps them."""
        return self._optimizer.param_groups[0]

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.options["lr"])

    @property
    def is_sgd(self) -> bool:
        """The optimizer is torch's SGD."""
        return isinstance(self._optimizer, torch.optim.SGD)

    @property
    def coupled_decay(self) -> float:
        """Factor of the weights in what the optimizer makes of a gradient: 0 where decay is decoupled or absent."""
        options = self.options
        if options.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)):
            return 0.0
        decay = float(options.get("weight_decay", 0.0))
        return -decay if options.get("maximize") else decay

    @property
    def momentum_buffer(self) -> torch.Tensor | None:
        """SGD's; None before the first step or without momentum."""
        buffer: torch.Tensor | None = self._optimizer.state[self._parameter].get("momentum_buffer")
        return buffer

    @momentum_buffer.setter
    def momentum_buffer(self, buffer: torch.Tensor) -> None:
        self._optimizer.state[self._parameter]["momentum_buffer"] = buffer

    def step(self, gradient: torch.Tensor, *, has_decay: bool = False) -> None:
        """One step of the optimizer.

        Args:
            gradient: 1-D, of these elements; not kept.
            has_decay: ``gradient`` contains the term of coupled weight decay already.
        """
        self._parameter.grad = gradient
        if has_decay and self.coupled_decay:
            options = self.options
            decay, options["weight_decay"] = options["weight_decay"], 0
            self._optimizer.step()
            options["weight_decay"] = decay
        else:
            self._optimizer.step()
        self._parameter.grad = None
