"""By how much a gradient is divided for the way that the weights have gone since: Gap-Aware's G, C and E.

One job: the state and arithmetic of the penalty at one granularity, on chunks. Which weights make the gap, what the
velocity is, and the optimizer's step are the business of ``gap_aware`` and ``dana``. Source: Barkai et al. 2020, arXiv
1909.10802.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch

from hydssp.update.chunk import Chunk
from hydssp.update.mitigation import Part, Setting

Position = Callable[[Chunk, Part], torch.Tensor]
"""Where a gradient is applied, on a chunk: the gap is this less the weights that it was computed from."""


class Penalty(ABC):
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


class ElementPenalty(Penalty):
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


class BlockPenalty(Penalty):
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
