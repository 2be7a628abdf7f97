"""What a worker computes in one iteration: from a batch range to the vector that it pushes.

One job: forward and backward passes. A range is cut into micro-batches; those of one step add up to the gradient of the
mean loss over the step's samples (``accumulate``), and after each step but the last the worker moves on its own copy of
the weights (``local_steps``). Passes may run in a shorter format (``precision``). Knows no transport, no time and no
server; decides nothing about when to go on.

With local steps theta_j = theta_0 - lr (g_1 + ... + g_j), where g_i is the gradient at theta_(i-1). What is pushed is
the sum of all g_i, which is (theta_0 - theta_k) / lr without the rounding of that difference, and for lr = 0 too.
Source: Stich 2019, arXiv 1805.09767.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hydssp.update.layout import FlatModule

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Outputs and targets to the mean loss of the batch, a scalar."""


@dataclass(frozen=True)
class Clip:
    """Bounds on the gradient of every step of a worker; None: no such bound.

    Attributes:
        value: Largest absolute value of an element.
        norm: Largest Euclidean norm of the whole gradient, which is scaled down to it.
    """

    value: float | None = None
    norm: float | None = None

    def apply(self, gradient: torch.Tensor) -> None:
        """Clip ``gradient``, 1-D, in place: by value first."""
        if self.value is not None:
            gradient.clamp_(-self.value, self.value)
        if self.norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_(torch.clamp(self.norm / (norm + 1e-6), max=1.0))


@dataclass(frozen=True)
class Plan:
    """How a range is cut.

    Attributes:
        batch_size: Samples of a micro-batch; the last one of a range may be smaller. Without effect when the other two
            are 1: then a range is one batch.
        accumulate: Micro-batches of a step.
        local_steps: Steps of a range.
        lr: Learning rate of a local step, before the schedule's factor.
        precision: ``torch.bfloat16`` or ``torch.float16``: that of ``torch.autocast``; None: none.
    """

    batch_size: int = 1
    accumulate: int = 1
    local_steps: int = 1
    lr: float = 0.0
    precision: torch.dtype | None = None

    def steps(self, count: int) -> Iterator[list[tuple[int, int]]]:
        """The micro-batches ``(start, stop)`` of each step of a range of ``count`` samples."""
        if self.accumulate == self.local_steps == 1:
            yield [(0, count)]
            return
        size = self.batch_size * self.accumulate
        for start in range(0, count, size):
            stop = min(start + size, count)
            yield [(a, min(a + self.batch_size, stop)) for a in range(start, stop, self.batch_size)]


ONE_BATCH = Plan()


@dataclass(frozen=True)
class Passed:
    """What came of a range, on the device and perhaps not computed yet.

    Attributes:
        loss: Mean over the samples, a scalar.
        correct: Samples classified right, a scalar; None where that has no meaning.
        is_finite: No loss and no gradient of a step, before clipping, contained inf or nan; a scalar.
        is_skipped: A gradient was not finite, and a smaller loss scale may help.
    """

    loss: torch.Tensor
    correct: torch.Tensor | None
    is_finite: torch.Tensor
    is_skipped: bool = False


class LossScale:
    """The factor on a loss in float16, so that small gradients do not vanish, as ``torch.amp.GradScaler`` moves it.

    It halves when a scaled gradient was not finite and doubles after ``GROWTH_STEPS`` good ones in a row. It does not
    fall below 1: where a gradient is not finite at that, scaling is not the cause.
    """

    INITIAL = 2.0**16
    GROWTH_STEPS = 2000

    def __init__(self) -> None:
        self.value = self.INITIAL
        self._good_steps = 0

    def update(self, *, is_finite: bool) -> None:
        """A step has been made, or not."""
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self.value = max(1.0, self.value / 2)
        elif self._good_steps == self.GROWTH_STEPS:
            self.value *= 2
            self._good_steps = 0


class Backward:
    """Passes through one module.

    Args:
        model: Module and flat vectors on the worker's device.
        loss: Mean loss of a batch.
        clip: Bounds on the gradient of each step.
        plan: How ranges are cut.

    Attributes:
        vector: 1-D, what the latest ``run`` came to: the gradient, or the sum of the gradients of all local steps.
    """

    def __init__(self, model: FlatModule, loss: Loss, clip: Clip, plan: Plan = ONE_BATCH) -> None:
        self._model = model
        self._loss = loss
        self._clip = clip
        self._plan = plan
        self._scales: defaultdict[int, LossScale] = defaultdict(LossScale)
        self.vector = model.gradient
        if plan.local_steps > 1:
            self.vector = torch.zeros_like(model.gradient)
            self._first_weights = torch.empty_like(model.weights)

    def run(
        self, inputs: torch.Tensor, targets: torch.Tensor, lr_factor: float = 1.0, worker: int = 0
    ) -> Passed:
        """Compute on one range from the weights as they are; with local steps the weights are other ones afterwards.

        A range ends at the first step that is skipped.

        Args:
            inputs: Of the whole range, samples first.
            targets: The same.
            lr_factor: Factor on the learning rate of local steps.
            worker: Who computes; each has a loss scale of its own.
        """
        model, plan, count = self._model, self._plan, len(inputs)
        loss = torch.zeros((), dtype=model.layout.dtype, device=model.weights.device)
        correct: torch.Tensor | None = torch.zeros((), dtype=torch.int64, device=model.weights.device)
        scale = self._scales[worker] if plan.precision is torch.float16 else None
        is_finite = torch.ones((), dtype=torch.bool, device=model.weights.device)
        if plan.local_steps > 1:
            self._first_weights.copy_(model.weights)
            self.vector.zero_()
        for number, step in enumerate(plan.steps(count)):
            if number:
                torch.sub(self._first_weights, self.vector, alpha=plan.lr * lr_factor, out=model.weights)
            model.zero_gradient()
            num_samples = step[-1][1] - step[0][0]
            for start, stop in step:
                outputs = self._forward(inputs[start:stop])
                value = self._loss(outputs, targets[start:stop])
                factor = (stop - start) / num_samples * (scale.value if scale else 1.0)
                (value if factor == 1.0 else value * factor).backward()  # type: ignore[no-untyped-call]
                value = value.detach()
                loss += value * ((stop - start) / count)
                is_finite &= torch.isfinite(value)
                if correct is not None:
                    hits = _hits(outputs, targets[start:stop])
                    correct = None if hits is None else correct + hits
            # Looked at here, where P workers share the cost, rather than on the server's path; and before clipping,
            # which would make an infinite element finite.
            is_gradient_finite = torch.isfinite(model.gradient).all()
            if scale:
                is_loss_finite, is_good, was = bool(is_finite), bool(is_gradient_finite), scale.value
                scale.update(is_finite=is_good)
                if is_loss_finite and not is_good and was > 1.0:
                    return Passed(loss, correct, is_gradient_finite, is_skipped=True)
                model.gradient.mul_(1.0 / was)
            is_finite &= is_gradient_finite
            self._clip.apply(model.gradient)
            if plan.local_steps > 1:
                self.vector += model.gradient
        return Passed(loss, correct, is_finite)

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs, in the layout's dtype where they are floating-point: the loss is computed in full precision."""
        model, precision = self._model, self._plan.precision
        if precision is None:
            outputs: torch.Tensor = model.module(inputs)
            return outputs
        with torch.autocast(model.weights.device.type, precision):
            outputs = model.module(inputs)
        return outputs.to(model.layout.dtype) if outputs.is_floating_point() else outputs


def _hits(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    """Samples classified right, a scalar; None where targets are no class numbers."""
    if outputs.ndim != 2 or targets.ndim != 1:
        return None
    return (outputs.detach().argmax(dim=1) == targets).sum()
