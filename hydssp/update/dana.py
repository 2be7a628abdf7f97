"""DANA: every worker has a momentum of its own, alone and with Gap-Aware's penalty.

One job: these momenta and what steps are made with them. Sources: Hakimi et al. 2019, arXiv 1907.11612; Barkai et al.
2020, arXiv 1909.10802.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hydssp.update import kernel
from hydssp.update.chunk import Chunk
from hydssp.update.gap_aware import GapAware
from hydssp.update.mitigation import MOMENTUM, Mitigation, Part, Setting


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
