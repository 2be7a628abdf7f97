"""What is done to a gradient because the weights have moved on since it was computed.

One job: the arithmetic of each method, on chunks, in place. Every method sits between the gradients of an update and
the optimizer's own step. Knows no transport and no clock; where old weights come from is the business of ``history``.
Which optimizers a method is defined for is checked by ``check_mitigation``.

A gradient whose weights have not moved is *fresh*: an update from fresh gradients alone takes the same path as without
mitigation, so that one worker alone and workers in rounds train bit for bit as without it (but for DANA, which changes
the momentum's form). Memory is given per method, in elements of the weights' dtype; one copy of the weights per worker
that computes on an older version comes on top where ``uses_old_weights`` (see ``history``). Working memory is a few
buffers of chunk size. k gradients of one update are treated one by one and then summed; each brings 1/k of the weight
decay, so that decay counts once per update as it does without mitigation.

Sources: staleness-aware, Zhang et al. 2016, arXiv 1511.05950; Gap-Aware, Barkai et al. 2020, arXiv 1909.10802; DANA,
Hakimi et al. 2019, arXiv 1907.11612; DC-ASGD, Zheng et al. 2017, arXiv 1609.08326.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hydssp.errors import UserError
from hydssp.update import kernel
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


Position = Callable[[Chunk, Part], torch.Tensor]
"""Where a gradient is applied, on a chunk: the gap is this less the weights that it was computed from."""


class _Penalty(ABC):
    """G = 1 + gap/C, at one granularity. E is the running mean square of the velocity, C = lr_max (RMS + 1e-8)."""

    DECAY = 0.999
    LEAST = 1e-8

    @abstractmethod
    def begin(self, parts: Sequence[Part], position: Position, progress: Callable[[], None]) -> None:
        """An update begins; learning rates are set."""

    @abstractmethod
    def prepare(self, chunk: Chunk) -> None:
        """Gradients of this chunk are about to be divided."""

    @abstractmethod
    def divide(
        self, chunk: Chunk, part: Part, now: torch.Tensor, position: Position, decay: float, out: torch.Tensor
    ) -> None:
        """Set ``out`` to ``(weight * gradient + decay * now) / G`` on the chunk."""

    @abstractmethod
    def learn(self, chunk: Chunk, number: int, velocity: torch.Tensor, factor: float) -> None:
        """Enter ``(factor * velocity)**2`` of the ``number``-th step of this update on this chunk into E."""

    @abstractmethod
    def end(self) -> None:
        """The update is made."""


class _ElementPenalty(_Penalty):
    """One G and one E per element.

    E is stored divided by the power of its decay since it was last rescaled: one pass a step then adds the new square,
    and nothing need be decayed.
    """

    RESCALE_BELOW = 1e-4

    def __init__(self, setting: Setting) -> None:
        chunks = setting.chunks
        self._square = setting.zeros(setting.numel)
        self._num_steps = [0] * len(chunks)
        self._scale = [1.0] * len(chunks)
        self._lr_max = [0.0] * len(chunks)
        self._least = [torch.zeros((), dtype=setting.dtype) for _ in chunks]
        self._unit, self._gap = setting.scratch(), setting.scratch()
        self._one = torch.ones((), dtype=setting.dtype)
        self._has_unit = False

    def begin(self, parts: Sequence[Part], position: Position, progress: Callable[[], None]) -> None:
        """Nothing: each chunk stands for itself."""

    def square(self, chunk: Chunk) -> torch.Tensor:
        """E on the chunk, divided by the scale."""
        return self._square[chunk.start : chunk.stop]

    def unit(self, chunk: Chunk) -> tuple[float, float] | None:
        """``(root, least)`` with which C is ``root * sqrt(square) + least``; None: there is no C yet."""
        i = chunk.number
        self._note_rate(i, chunk)
        self._rescale(i, chunk)
        if not self._num_steps[i] or not self._lr_max[i]:
            return None
        root = self._lr_max[i] * math.sqrt(self._scale[i] / (1.0 - self.DECAY ** self._num_steps[i]))
        return root, self._lr_max[i] * self.LEAST

    def prepare(self, chunk: Chunk) -> None:
        """C on the chunk."""
        unit = self.unit(chunk)
        self._has_unit = unit is not None
        if unit is not None:
            out = torch.sqrt(self.square(chunk), out=self._unit[: chunk.stop - chunk.start])
            torch.add(self._least[chunk.number], out, alpha=unit[0], out=out)

    def _note_rate(self, i: int, chunk: Chunk) -> None:
        if chunk.lr > self._lr_max[i]:
            self._lr_max[i] = chunk.lr
            self._least[i].fill_(chunk.lr * self.LEAST)

    def _rescale(self, i: int, chunk: Chunk) -> None:
        if self._scale[i] < self.RESCALE_BELOW:
            self.square(chunk).mul_(self._scale[i])
            self._scale[i] = 1.0

    def divide(
        self, chunk: Chunk, part: Part, now: torch.Tensor, position: Position, decay: float, out: torch.Tensor
    ) -> None:
        """See the base."""
        a, b = chunk.start, chunk.stop
        gradient, is_plain = part.gradient[a:b], part.weight == 1.0 and not decay
        if not is_plain:
            gradient = torch.mul(gradient, part.weight, out=out)
            gradient.add_(now, alpha=decay)
        if part.used is not None:
            gap = torch.sub(position(chunk, part), part.used[a:b], out=self._gap[: b - a])
            part.gap_square_sum += float(torch.dot(gap, gap))
            if self._has_unit:
                penalty = torch.addcdiv(self._one, gap.abs_(), self._unit[: b - a], out=gap)
                part.penalty_sum += float(penalty.sum())
                part.penalty_max = max(part.penalty_max, float(penalty.max()))
                torch.div(gradient, penalty, out=out)
                return
            part.penalty_sum += b - a
        if is_plain:
            out.copy_(gradient)

    def learn(self, chunk: Chunk, number: int, velocity: torch.Tensor, factor: float) -> None:
        """See the base."""
        share = self.count_step(chunk)
        self.square(chunk).addcmul_(velocity, velocity, value=share * factor * factor)

    def count_step(self, chunk: Chunk) -> float:
        """One more step enters E; returns the factor on its squares in the scaled form."""
        i = chunk.number
        self._note_rate(i, chunk)
        self._rescale(i, chunk)
        self._scale[i] *= self.DECAY
        self._num_steps[i] += 1
        return (1.0 - self.DECAY) / self._scale[i]

    def end(self) -> None:
        """Nothing."""


class _BlockPenalty(_Penalty):
    """One G and one E per block of elements, from the root mean squares over it. No memory per element.

    The gap of a whole block must be known before its first chunk is changed: one more pass over the weights.
    """

    def __init__(self, setting: Setting, blocks: Sequence[tuple[int, int]]) -> None:
        self._chunks = setting.chunks
        self._sizes = [stop - start for start, stop in blocks]
        self._segments = [list(_cut(chunk, blocks)) for chunk in setting.chunks]
        self._mean_square = [0.0] * len(blocks)
        self._num_steps = 0
        self._lr_max = [0.0] * len(blocks)
        self._gap = setting.scratch()
        self._penalties: dict[int, list[float]] = {}
        self._new: dict[int, list[float]] = {}

    def begin(self, parts: Sequence[Part], position: Position, progress: Callable[[], None]) -> None:
        """The penalty of every block for every gradient that is not fresh."""
        num_blocks = len(self._sizes)
        for chunk, segments in zip(self._chunks, self._segments, strict=True):
            for *_, block in segments:
                self._lr_max[block] = max(self._lr_max[block], chunk.lr)
        self._penalties = {}
        for part in parts:
            if part.used is None:
                continue
            squares = [0.0] * num_blocks
            for chunk, segments in zip(self._chunks, self._segments, strict=True):
                a, b = chunk.start, chunk.stop
                gap = torch.sub(position(chunk, part), part.used[a:b], out=self._gap[: b - a])
                for start, stop, block in segments:
                    piece = gap[start - a : stop - a]
                    squares[block] += float(torch.dot(piece, piece))
                progress()
            penalties = [
                self._penalty(block, math.sqrt(square / size))
                for block, (square, size) in enumerate(zip(squares, self._sizes, strict=True))
            ]
            self._penalties[part.worker] = penalties
            part.gap_square_sum = math.fsum(squares)
            part.penalty_sum = math.fsum(p * size for p, size in zip(penalties, self._sizes, strict=True))
            part.penalty_max = max(penalties)

    def _penalty(self, block: int, gap: float) -> float:
        if not self._num_steps or not self._lr_max[block]:
            return 1.0
        mean = self._mean_square[block] / (1.0 - self.DECAY**self._num_steps)
        return 1.0 + gap / (self._lr_max[block] * (math.sqrt(mean) + self.LEAST))

    def prepare(self, chunk: Chunk) -> None:
        """Nothing: all is known since ``begin``."""

    def divide(
        self, chunk: Chunk, part: Part, now: torch.Tensor, position: Position, decay: float, out: torch.Tensor
    ) -> None:
        """See the base."""
        penalties = self._penalties.get(part.worker)
        for start, stop, block in self._segments[chunk.number]:
            share = 1.0 / penalties[block] if penalties else 1.0
            local = slice(start - chunk.start, stop - chunk.start)
            piece = torch.mul(part.gradient[start:stop], part.weight * share, out=out[local])
            if decay:
                piece.add_(now[local], alpha=decay * share)

    def learn(self, chunk: Chunk, number: int, velocity: torch.Tensor, factor: float) -> None:
        """See the base."""
        sums = self._new.setdefault(number, [0.0] * len(self._sizes))
        for start, stop, block in self._segments[chunk.number]:
            piece = velocity[start - chunk.start : stop - chunk.start]
            sums[block] += float(torch.dot(piece, piece)) * factor * factor

    def end(self) -> None:
        """Enter the means of this update's squares into E."""
        for sums in self._new.values():
            for block, (total, size) in enumerate(zip(sums, self._sizes, strict=True)):
                old = self._mean_square[block]
                self._mean_square[block] = self.DECAY * old + (1.0 - self.DECAY) * total / size
            self._num_steps += 1
        self._new = {}


def _cut(chunk: Chunk, blocks: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """``(start, stop, block)`` of the parts of ``chunk`` that lie in one block each."""
    for number, (start, stop) in enumerate(blocks):
        a, b = max(start, chunk.start), min(stop, chunk.stop)
        if a < b:
            yield a, b, number


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
        self._penalty: _Penalty
        if self._granularity == "element":
            self._penalty = _ElementPenalty(setting)
        else:
            whole = [(0, setting.numel)]
            self._penalty = _BlockPenalty(
                setting, setting.tensors if self._granularity == "tensor" else whole
            )

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
        assert isinstance(penalty, _ElementPenalty)
        velocity, momenta = self._velocity_of(chunk, part.worker)
        if len(parts) > 1 or part.used is None or velocity is None or (unit := penalty.unit(chunk)) is None:
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


class _WorkersMomenta:
    """SGD's momentum buffer, one per worker: P values per element."""

    def __init__(self, setting: Setting) -> None:
        self._momenta = setting.zeros(setting.num_workers, setting.numel)
        for chunk in setting.chunks:
            chunk.options["nesterov"] = True

    def of(self, worker: int, chunk: Chunk) -> torch.Tensor:
        """The momentum of ``worker`` on ``chunk``, in place."""
        return self._momenta[worker, chunk.start : chunk.stop]

    def step(self, chunk: Chunk, worker: int, gradient: torch.Tensor, *, has_decay: bool) -> None:
        """``v_i <- gamma v_i + g``, then ``weights <- weights - lr (gamma v_i + g)``: Nesterov's step on this v."""
        chunk.momentum_buffer = self.of(worker, chunk)
        chunk.step(gradient, has_decay=has_decay)


class Dana(Mitigation):
    """DANA-Slim: every worker has a momentum v_i of its own, the step is ``lr (gamma v_i + g)`` with v_i updated.

    With one worker this is Nesterov's momentum, and in rounds of equal batches too, at P times the memory: refused
    there. The momenta are kept here and not at the workers: the server has every gradient anyway, a gradient that it
    refuses leaves no trace in v_i, and Gap-Aware's penalty, which only the server can compute, may enter v_i
    (``dana_gap_aware``).

    Memory: P values per element, got as the workers push for the first time; no buffer of the optimizer's own.
    """

    name = "dana"
    async_weight = "one"
    optimizers = MOMENTUM
    is_for_rounds = False

    def bind(self, setting: Setting) -> None:
        """Allocate the momenta."""
        super().bind(setting)
        self._momenta = _WorkersMomenta(setting)

    def _step(self, chunk: Chunk, parts: Sequence[Part]) -> None:
        """One step per gradient, all from the weights before the update."""
        if len(parts) == 1:
            self._momenta.step(chunk, parts[0].worker, self._sum(chunk, parts), has_decay=False)
            return
        a, b = chunk.start, chunk.stop
        now = self._term[: b - a].copy_(chunk.weights)
        for part in parts:
            gradient = torch.mul(part.gradient[a:b], part.weight, out=self._total[: b - a])
            gradient.add_(now, alpha=chunk.coupled_decay / len(parts))
            self._momenta.step(chunk, part.worker, gradient, has_decay=True)


class DanaGapAware(GapAware):
    """Gap-Aware's penalised gradient enters DANA's v_i; E is the running mean square of the v_i.

    The weights here are those after the look-ahead: what DANA calls the master's parameters, less ``lr gamma`` times
    the sum of all v_j, which is where it expects them to be when the gradient comes back. So a gradient was computed
    from the expectation, and is applied where the others' momenta have in fact led: the gap is the weights now, plus
    ``lr gamma`` times the sum of the other workers' v_j, less the weights used. It contains what was not foreseen, the
    gradients that came in between, but not the momentum that was. A worker's own v_i is its Nesterov's look-ahead and
    no gap, so that with one worker nothing is divided.

    Memory: that of ``gap_aware`` and of ``dana``, and the sum of the momenta, one value per element.

    Args:
        granularity: As in ``GapAware``.
        compiled: As in ``GapAware``.
    """

    name = "dana_gap_aware"
    optimizers = MOMENTUM
    is_for_rounds = False

    def probe(self, dtype: torch.dtype) -> None:
        """Compile."""
        if self.is_compiled:
            kernel.probe(dtype, is_dana=True)

    def bind(self, setting: Setting) -> None:
        """Allocate E, the momenta, their sum and the buffers."""
        super().bind(setting)
        self._momenta = _WorkersMomenta(setting)
        self._sum_of_momenta = setting.zeros(setting.numel)
        self._applied_at = setting.scratch()

    def _velocity_of(self, chunk: Chunk, worker: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self._momenta.of(worker, chunk), self._sum_of_momenta[chunk.start : chunk.stop]

    def _position(self, chunk: Chunk, part: Part) -> torch.Tensor:
        return self._place(chunk, part.worker, chunk.weights, self._sum_of_momenta[chunk.start : chunk.stop])

    def _place(self, chunk: Chunk, worker: int, now: torch.Tensor, momenta: torch.Tensor) -> torch.Tensor:
        reach = chunk.lr * float(chunk.options["momentum"])
        place = torch.add(now, momenta, alpha=reach, out=self._applied_at[: chunk.stop - chunk.start])
        return place.sub_(self._momenta.of(worker, chunk), alpha=reach)

    def _step(self, chunk: Chunk, parts: Sequence[Part]) -> None:
        """One step per gradient, all from the weights and momenta before the update."""
        size = chunk.stop - chunk.start
        if len(parts) == 1:
            (part,) = parts
            if part.used is None:
                self._step_and_learn(chunk, 0, part, self._sum(chunk, parts), has_decay=False)
                return
            now, position = chunk.weights, self._position
        else:
            now = self._term[:size].copy_(chunk.weights)
            before = self._sum_of_momenta[chunk.start : chunk.stop].clone()

            def position(chunk: Chunk, part: Part) -> torch.Tensor:
                return self._place(chunk, part.worker, now, before)

        gradient, decay = self._total[:size], chunk.coupled_decay / len(parts)
        self._penalty.prepare(chunk)
        for number, part in enumerate(parts):
            self._penalty.divide(chunk, part, now, position, decay, gradient)
            self._step_and_learn(chunk, number, part, gradient, has_decay=True)

    def _step_and_learn(
        self, chunk: Chunk, number: int, part: Part, gradient: torch.Tensor, *, has_decay: bool
    ) -> None:
        total = self._sum_of_momenta[chunk.start : chunk.stop]
        momentum = self._momenta.of(part.worker, chunk)
        total.sub_(momentum)
        self._momenta.step(chunk, part.worker, gradient, has_decay=has_decay)
        total.add_(momentum)
        self._penalty.learn(chunk, number, momentum, 1.0)


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
        if strength is not None and not 0 <= strength < math.inf:
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
