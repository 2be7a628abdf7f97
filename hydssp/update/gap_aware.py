"""Gap-Aware: a gradient is divided by how far the weights have gone since, beside how far an update usually goes.

One job: the method, between ``penalty``'s arithmetic and the optimizer's step on a chunk. Source: Barkai et al. 2020,
arXiv 1909.10802.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from hydssp.errors import UserError
from hydssp.update import kernel
from hydssp.update.chunk import Chunk
from hydssp.update.mitigation import KNOWN, Mitigation, Part, Setting
from hydssp.update.penalty import BlockPenalty, ElementPenalty, Penalty
from hydssp.update.updater import Effect


class _Velocity:
    """How an optimizer's usual step per unit of learning rate is had from one chunk, for the mean square E.

    SGD: the momentum buffer, or the gradient with its decay where there is no momentum. Adam, AdamW: the step that was
    really made, divided by the learning rate.
    """

    def __init__(self, setting: Setting) -> None:
        self._buffer = setting.scratch()

    def before(self, chunk: Chunk, gradient: torch.Tensor, *, has_decay: bool) -> torch.Tensor | None:
        """Called before the step, with what the optimizer will get."""
        if not chunk.is_sgd:
            return self._buffer[: chunk.stop - chunk.start].copy_(chunk.weights)
        if chunk.options["momentum"]:
            return None
        if has_decay or not chunk.coupled_decay:
            return gradient
        return torch.add(
            gradient, chunk.weights, alpha=chunk.coupled_decay, out=self._buffer[: chunk.stop - chunk.start]
        )

    def after(self, chunk: Chunk, noted: torch.Tensor | None) -> tuple[torch.Tensor, float] | None:
        """Called after the step, with what ``before`` gave: the velocity and a factor on it; None: the rate was 0."""
        if noted is None:
            buffer = chunk.momentum_buffer
            assert buffer is not None
            return buffer, 1.0
        if chunk.is_sgd:
            return noted, 1.0
        return (noted.sub_(chunk.weights), 1.0 / chunk.lr) if chunk.lr else None


GRANULARITIES = ("element", "tensor", "scalar")


class GapAware(Mitigation):
    """Gradient and coupled weight decay are divided by G = 1 + |weights now - weights used| / C before the momentum.

    C is how far one update usually moves an element: ``lr_max * (sqrt(E / (1 - b**n)) + 1e-8)``, E the running mean
    square (b = 0.999) of the velocity over n updates, see ``_Velocity``. G = 1 before the first update and where C is
    0. Decoupled decay (AdamW) is no part of the gradient and stays as it is.

    Memory: E, one value per element for ``element``, else one per tensor or one in all; and old weights.

    Args:
        granularity: One G per ``element``, per ``tensor`` or one for all (``scalar``), the latter two from root mean
            squares.
        compiled: Updates from single gradients, SGD's step included, are made by one compiled kernel, see ``kernel``.
            For ``element`` and SGD with momentum. The results are the same but for rounding.

    Raises:
        UserError: When the granularity is none of these, or not for a kernel.
    """

    name = "gap_aware"
    async_weight = "one"
    uses_old_weights = True
    optimizers = KNOWN

    def __init__(self, granularity: str = "element", *, compiled: bool = False) -> None:
        if granularity not in GRANULARITIES:
            raise UserError(f"mitigation.granularity={granularity}: allowed is {', '.join(GRANULARITIES)}")
        if compiled and granularity != "element":
            raise UserError(
                f"mitigation.compiled=true mitigation.granularity={granularity}: there is a kernel for "
                "granularity=element only; set mitigation.compiled=false, or leave the granularity at element"
            )
        self._granularity = granularity
        self.is_compiled = compiled

    def bind(self, setting: Setting) -> None:
        """Allocate E and the buffers."""
        super().bind(setting)
        self._velocity = _Velocity(setting)
        self._penalty: Penalty
        if self._granularity == "element":
            self._penalty = ElementPenalty(setting)
        else:
            whole = [(0, setting.numel)]
            self._penalty = BlockPenalty(setting, setting.tensors if self._granularity == "tensor" else whole)

    def begin(self, parts: Sequence[Part], progress: Callable[[], None]) -> None:
        """Blocks look at their gap beforehand."""
        self._penalty.begin(parts, self._position, progress)

    def _position(self, chunk: Chunk, part: Part) -> torch.Tensor:
        return chunk.weights

    def probe(self, dtype: torch.dtype) -> None:
        """Compile."""
        if self.is_compiled:
            kernel.probe(dtype, is_dana=False)

    def step(self, chunk: Chunk, parts: Sequence[Part], kept: torch.Tensor | None = None) -> None:
        """See the base; by the kernel where there is one and the update is one for it."""
        if not self.is_compiled or not self._step_at_once(chunk, parts, kept):
            super().step(chunk, parts, kept)

    def _step_at_once(self, chunk: Chunk, parts: Sequence[Part], kept: torch.Tensor | None) -> bool:
        """Make the step by the kernel, if it is one for it: whether that was done."""
        part, penalty, size = parts[0], self._penalty, chunk.stop - chunk.start
        assert isinstance(penalty, ElementPenalty)
        if len(parts) > 1 or part.used is None or size == 1:  # torch would compile anew for one element
            return False
        velocity, momenta = self._velocity_of(chunk, part.worker)
        if velocity is None or (unit := penalty.unit(chunk)) is None:
            return False
        options = chunk.options
        momentum, sign = float(options["momentum"]), -1.0 if options["maximize"] else 1.0
        numbers = kernel.Numbers(
            lr=chunk.lr,
            momentum=momentum,
            new_share=1.0 if options["nesterov"] else 0.0,
            velocity_share=momentum if options["nesterov"] else 1.0,
            weight=sign * part.weight,
            decay=sign * chunk.coupled_decay,
            root=unit[0],
            least=unit[1],
            learn=penalty.count_step(chunk),
        )
        found = kernel.compiled()(
            chunk.weights,
            part.used[chunk.start : chunk.stop],
            part.gradient[chunk.start : chunk.stop],
            penalty.square(chunk),
            velocity,
            momenta,
            self._term[:size] if kept is None else kept,
            torch.tensor(numbers, dtype=chunk.weights.dtype),
        )
        squares, penalties, largest = found.tolist()
        part.gap_square_sum += squares
        part.penalty_sum += penalties
        part.penalty_max = max(part.penalty_max, largest)
        return True

    def _velocity_of(self, chunk: Chunk, worker: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The momentum buffer, if there is one yet; and the sum of all workers', if there is one for each."""
        return chunk.momentum_buffer, None

    def _step(self, chunk: Chunk, parts: Sequence[Part]) -> None:
        """Divide each gradient, sum, step, and learn how far that went."""
        has_decay = any(part.used is not None for part in parts)
        total = self._penalised_sum(chunk, parts) if has_decay else self._sum(chunk, parts)
        noted = self._velocity.before(chunk, total, has_decay=has_decay)
        chunk.step(total, has_decay=has_decay)
        self._learn(chunk, 0, noted)

    def _learn(self, chunk: Chunk, number: int, noted: torch.Tensor | None) -> None:
        if (velocity := self._velocity.after(chunk, noted)) is not None:
            self._penalty.learn(chunk, number, *velocity)

    def _penalised_sum(self, chunk: Chunk, parts: Sequence[Part]) -> torch.Tensor:
        size = chunk.stop - chunk.start
        total, term = self._total[:size], self._term[:size]
        decay = chunk.coupled_decay / len(parts)
        self._penalty.prepare(chunk)
        for number, part in enumerate(parts):
            out = term if number else total
            self._penalty.divide(chunk, part, chunk.weights, self._position, decay, out)
            if number:
                total.add_(term)
        return total

    def end(self, parts: Sequence[Part]) -> list[Effect]:
        """Gap and penalty of each gradient."""
        self._penalty.end()
        return [self._effect(part) for part in parts]

    def _effect(self, part: Part) -> Effect:
        if part.used is None:
            return Effect(0.0, 1.0, 1.0, part.is_exact)
        numel = self._setting.numel
        gap = math.sqrt(part.gap_square_sum / numel)
        return Effect(gap, part.penalty_sum / numel, part.penalty_max, part.is_exact)
