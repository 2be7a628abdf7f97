"""What is done to a gradient because the weights have moved on since it was computed.

One job: what a method is, and the arithmetic of the simple ones, on chunks, in place; ``gap_aware`` and ``dana`` have
the others. Every method sits between the gradients of an update and the optimizer's own step. Knows no transport and no
clock; where old weights come from is the business of ``history``. Which optimizers a method is defined for is checked
by ``check_mitigation``.

A gradient whose weights have not moved is *fresh*: an update from fresh gradients alone takes the same path as without
mitigation, so that one worker alone and workers in rounds train bit for bit as without it (but for DANA, which changes
the momentum's form). Memory is given per method, in elements of the weights' dtype; one copy of the weights per worker
that computes on an older version comes on top where ``uses_old_weights`` (see ``history``). Working memory is a few
buffers of chunk size. k gradients of one update are treated one by one and then summed; each brings 1/k of the weight
decay, so that decay counts once per update as it does without mitigation.

Sources: staleness-aware, Zhang et al. 2016, arXiv 1511.05950; DC-ASGD, Zheng et al. 2017, arXiv 1609.08326.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hydssp.errors import UserError
from hydssp.update.chunk import Chunk
from hydssp.update.updater import Effect

MOMENTUM = "torch.optim.SGD with momentum above 0 and dampening 0"
KNOWN = "torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW"


@dataclass(slots=True)
class Part:
    """One gradient of an update, and what is found out about it on the way.

    Attributes:
        worker: Whose.
        gradient: 1-D, whole.
        weight: Its factor in the sum.
        staleness: In versions.
        used: The weights that it was computed from; None where they are those of now (fresh) or not asked for.
        is_exact: ``used`` is that very version.
    """

    worker: int
    gradient: torch.Tensor
    weight: float
    staleness: int
    used: torch.Tensor | None = None
    is_exact: bool = True
    gap_square_sum: float = 0.0
    penalty_sum: float = 0.0
    penalty_max: float = 1.0


@dataclass(frozen=True)
class Setting:
    """What a method works on.

    Attributes:
        chunks: All pieces of the vector, in order.
        tensors: ``(start, stop)`` of each parameter tensor.
        numel: Elements of the vector.
        dtype: Of the weights.
        num_workers: P.
    """

    chunks: Sequence[Chunk]
    tensors: Sequence[tuple[int, int]]
    numel: int
    dtype: torch.dtype
    num_workers: int

    @property
    def chunk_numel(self) -> int:
        """Elements of the largest chunk."""
        return max(chunk.stop - chunk.start for chunk in self.chunks)

    def scratch(self) -> torch.Tensor:
        """A buffer of chunk size."""
        return torch.empty(self.chunk_numel, dtype=self.dtype)

    def zeros(self, *shape: int) -> torch.Tensor:
        """Zeros that get their memory page by page, when they are first written."""
        return torch.from_numpy(np.zeros(shape, dtype=str(self.dtype).rpartition(".")[2]))


class Mitigation:
    """``none``: gradients as they are. Also the base of the methods. No memory.

    Attributes:
        name: As in the configuration.
        async_weight: The learning rate of a step from single pushes where the configuration leaves it open:
            ``per_worker`` (1/P) or ``one``. A method that damps stale gradients itself takes the full rate, as its
            paper does.
        uses_old_weights: It compares with the weights that a gradient was computed from.
        optimizers: What it is defined for, in words; None: any.
        is_for_rounds: It has a meaning where all gradients of a round are averaged.
        is_compiled: It uses a compiled kernel, which contains SGD's momentum.
    """

    name: ClassVar[str] = "none"
    async_weight: ClassVar[str] = "per_worker"
    uses_old_weights: ClassVar[bool] = False
    optimizers: ClassVar[str | None] = None
    is_for_rounds: ClassVar[bool] = True
    is_compiled: bool = False

    def probe(self, dtype: torch.dtype) -> None:
        """Find out whether what the method needs beside torch is there, for weights of ``dtype``.

        Raises:
            UserError: When it is not.
        """

    def bind(self, setting: Setting) -> None:
        """Allocate what the method needs; once, before the first update."""
        self._setting = setting
        self._total, self._term = setting.scratch(), setting.scratch()

    def weigh(self, parts: Sequence[Part]) -> float:
        """Change the gradients' weights; returns a factor on the learning rate of this update."""
        return 1.0

    def begin(self, parts: Sequence[Part], progress: Callable[[], None]) -> None:
        """An update begins, learning rates are set; ``progress`` is to be called after a chunk's worth of work."""

    def step(self, chunk: Chunk, parts: Sequence[Part], kept: torch.Tensor | None = None) -> None:
        """Make the update's step on one chunk.

        Args:
            chunk: Its weights change.
            parts: The gradients.
            kept: Where the chunk's weights as they are now must be copied to, [n]; None: nowhere.
        """
        if kept is not None:
            kept.copy_(chunk.weights)
        self._step(chunk, parts)

    def _step(self, chunk: Chunk, parts: Sequence[Part]) -> None:
        """The same, when nothing need be kept any more."""
        chunk.step(self._sum(chunk, parts))

    def end(self, parts: Sequence[Part]) -> list[Effect]:
        """The update is made; returns what was found out about each gradient, nothing where that is not known."""
        return []

    def _sum(self, chunk: Chunk, parts: Sequence[Part]) -> torch.Tensor:
        """The weighted sum of gradients on ``chunk``; the gradient itself if it stands alone."""
        a, b = chunk.start, chunk.stop
        first, *others = parts
        if first.weight == 1.0 and not others:
            return first.gradient[a:b]
        total = torch.mul(first.gradient[a:b], first.weight, out=self._total[: b - a])
        for part in others:
            total.add_(part.gradient[a:b], alpha=part.weight)
        return total


class StalenessAware(Mitigation):
    """The step is divided by max(1, staleness). No memory; any optimizer.

    In an update from several gradients the step is divided by the harmonic mean of their divisors, and their weights
    in the sum are in proportion to 1/divisor: for SGD without momentum the same as dividing each one.
    """

    name = "staleness_aware"
    async_weight = "one"

    def weigh(self, parts: Sequence[Part]) -> float:
        """Weights with the mean that they had, and the mean of 1/max(1, staleness) as the factor."""
        shares = [1.0 / max(1, part.staleness) for part in parts]
        if len(set(shares)) == 1:
            return shares[0]
        mean = math.fsum(shares) / len(shares)
        for part, share in zip(parts, shares, strict=True):
            part.weight *= share / mean
        return mean

    def end(self, parts: Sequence[Part]) -> list[Effect]:
        """The divisors."""
        divisors = [float(max(1, part.staleness)) for part in parts]
        return [Effect(None, divisor, divisor) for divisor in divisors]


class DelayCompensated(Mitigation):
    """DC-ASGD: ``g + lambda g g (weights now - weights used)``, a cheap guess at the gradient of the weights now.

    Adaptive: lambda is divided, per element, by ``sqrt(m + 1e-7)``, m the running mean square of g (0.95) with this
    gradient in it. Weight decay is the optimizer's own, from the weights now.

    Memory: old weights; one value per element more where it is adaptive.

    Args:
        strength: lambda; None: 0.04, or 2 where it is adaptive.
        adaptive: Whether it is.

    Raises:
        UserError: When the strength is not a finite number of at least 0.
    """

    name = "delay_compensated"
    uses_old_weights = True
    optimizers = KNOWN

    DECAY = 0.95
    LEAST = 1e-7

    def __init__(self, strength: float | None = None, *, adaptive: bool = False) -> None:
        is_number = isinstance(strength, int | float) and not isinstance(strength, bool)
        if strength is not None and not (is_number and 0 <= strength < math.inf):
            raise UserError(
                f"mitigation.strength={strength}: allowed is a number of at least 0, or null for the paper's"
            )
        self._is_adaptive = adaptive
        self._strength = (2.0 if adaptive else 0.04) if strength is None else strength

    def bind(self, setting: Setting) -> None:
        """Allocate the buffers, and m where it is adaptive."""
        super().bind(setting)
        self._gap, self._root = setting.scratch(), setting.scratch()
        if self._is_adaptive:
            self._mean_square = setting.zeros(setting.numel)

    def _step(self, chunk: Chunk, parts: Sequence[Part]) -> None:
        """Compensate each gradient, sum, step."""
        if self._is_adaptive:
            mean_square = self._mean_square[chunk.start : chunk.stop]
        if all(part.used is None for part in parts):
            if self._is_adaptive:
                for part in parts:
                    self._learn(mean_square, part.gradient[chunk.start : chunk.stop])
            chunk.step(self._sum(chunk, parts))
            return
        size = chunk.stop - chunk.start
        total, term = self._total[:size], self._term[:size]
        for number, part in enumerate(parts):
            gradient, out = part.gradient[chunk.start : chunk.stop], term if number else total
            if self._is_adaptive:
                self._learn(mean_square, gradient)
            if part.used is None:
                out.copy_(gradient)
            else:
                gap = torch.sub(chunk.weights, part.used[chunk.start : chunk.stop], out=self._gap[:size])
                part.gap_square_sum += float(torch.dot(gap, gap))
                gap.mul_(gradient)
                if self._is_adaptive:
                    root = torch.add(mean_square, self.LEAST, out=self._root[:size]).sqrt_()
                    torch.addcdiv(gradient, gap.mul_(gradient), root, value=self._strength, out=out)
                else:
                    torch.addcmul(gradient, gradient, gap, value=self._strength, out=out)
            if part.weight != 1.0:
                out.mul_(part.weight)
            if number:
                total.add_(out)
        chunk.step(total)

    def _learn(self, mean_square: torch.Tensor, gradient: torch.Tensor) -> None:
        mean_square.mul_(self.DECAY).addcmul_(gradient, gradient, value=1.0 - self.DECAY)

    def end(self, parts: Sequence[Part]) -> list[Effect]:
        """The gap of each gradient."""
        numel = self._setting.numel
        return [Effect(math.sqrt(part.gap_square_sum / numel), None, None, part.is_exact) for part in parts]


def check_mitigation(
    mitigation: Mitigation,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]] = (),
    *,
    is_synchronous: bool = False,
) -> None:
    """Refuse a mitigation that has no meaning with this optimizer or paradigm.

    Args:
        mitigation: The method.
        optimizer: As configured, on any parameter.
        groups: Options that replace the optimizer's own for some parameters.
        is_synchronous: Whether updates are made of whole rounds.

    Raises:
        UserError: Naming the mitigation and what it is defined for.
    """
    name = mitigation.name
    if is_synchronous and not mitigation.is_for_rounds:
        raise UserError(
            f"mitigation={name}: in rounds nothing is stale, and a momentum per worker comes to Nesterov's momentum at "
            "as many times the memory as there are workers; use mitigation=none optimizer.nesterov=true, or a paradigm "
            "without rounds"
        )
    if mitigation.optimizers is None:
        return
    kind = type(optimizer)  # exactly these: a subclass may step in another way
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise UserError(
            f"mitigation={name} optimizer={kind.__module__}.{kind.__qualname__}: not defined for it; allowed with "
            f"{name} is {mitigation.optimizers}; any optimizer goes with mitigation=none and staleness_aware"
        )
    if mitigation.optimizers != MOMENTUM and not mitigation.is_compiled:
        return
    said = f"{name} mitigation.compiled=true" if mitigation.is_compiled else name
    for options in [optimizer.defaults, *({**optimizer.defaults, **group} for group in groups)]:
        if kind is not torch.optim.SGD or not options["momentum"] > 0 or options["dampening"] != 0:
            shown = ", ".join(f"{key}={options[key]}" for key in ("momentum", "dampening") if key in options)
            raise UserError(
                f"mitigation={said} optimizer={kind.__name__}{f' with {shown}' if shown else ''}: a form of SGD's "
                f"momentum; allowed with {said} is {MOMENTUM}"
            )
