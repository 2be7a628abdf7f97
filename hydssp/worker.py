"""The worker's loop: wait for a grant, pull, compute a gradient, push.

One job: one worker's side of the iteration. Works with any transport of ``transport.protocol`` and knows neither MPI
nor Hydra nor any paradigm: when it may go on is the server's business alone. It never blocks: ``step`` does what can
be done now and says what it waits for, so that one process can run many workers and a held worker costs no core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import torch

from hydssp.straggler import Straggler
from hydssp.transport.backoff import Backoff
from hydssp.transport.messages import Clock, Grant
from hydssp.transport.protocol import WorkerTransport
from hydssp.update.layout import FlatModule

Batches = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]
"""``(epoch, start, count)`` to inputs and targets of that range of the epoch's order, on the worker's device."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Outputs and targets to the mean loss of the batch, a scalar."""


class Progress(Enum):
    """What one call of ``Worker.step`` came to."""

    ADVANCED = "advanced"
    WAITING_FOR_GRANT = "waiting for a grant"
    PADDING = "padding its iteration"
    DONE = "done"


class Worker:
    """One worker between its transport and its module.

    Args:
        transport: The worker's end.
        model: Module and flat vectors on the worker's device.
        batches: Makes the batch of a range.
        loss: Mean loss of a batch.
        straggler: How long an iteration shall take at least.
    """

    def __init__(
        self,
        transport: WorkerTransport,
        model: FlatModule,
        batches: Batches,
        loss: Loss,
        straggler: Straggler,
    ) -> None:
        self.iterations = 0
        self.doing = Progress.WAITING_FOR_GRANT
        self._transport = transport
        self._model = model
        self._batches = batches
        self._loss = loss
        self._straggler = straggler
        # The transport moves host memory. On a GPU these are pinned and copied from and to; on a CPU they are the
        # model's own vectors, so that a pull writes straight into the weights.
        self._on_gpu = model.weights.device.type == "cuda"
        self._host_weights, self._host_gradient = model.weights, model.gradient
        if self._on_gpu:
            self._host_weights, self._host_gradient = (
                torch.empty(model.layout.numel, dtype=model.layout.dtype, pin_memory=True) for _ in range(2)
            )
        self._weights_view = self._host_weights.detach().numpy()
        self._gradient_view = self._host_gradient.detach().numpy()
        self._pending: tuple[Clock, bool] | None = None
        self._push_not_before = 0.0
        self._began_at = 0.0
        self._computing_from = 0.0

    @property
    def padding_left_s(self) -> float:
        """Seconds until a padded iteration may push."""
        return max(0.0, self._push_not_before - self._transport.now())

    def step(self) -> Progress:
        """Do the next thing that can be done without waiting."""
        if self._pending is not None:
            self.doing = self._push_when_padded()
        elif (grant := self._transport.poll_grant()) is None:
            self.doing = Progress.WAITING_FOR_GRANT
        elif grant.stop:
            self.doing = Progress.DONE
        else:
            self._compute(grant)
            self.doing = self._push_when_padded()
        return self.doing

    def _compute(self, grant: Grant) -> None:
        now = self._transport.now
        self._began_at = now()
        if grant.count == 0:
            self._pending = (Clock(grant.iteration, grant.version, samples=0), False)
            self._push_not_before = self._began_at
            return
        version, retries = self._transport.pull(self._weights_view, grant.version)
        if self._on_gpu:
            self._model.weights.copy_(self._host_weights, non_blocking=True)
        pulled_at = now()
        inputs, targets = self._batches(grant.epoch, grant.start, grant.count)
        self._computing_from = now()
        model = self._model
        model.zero_gradient()
        outputs = model.module(inputs)
        loss = self._loss(outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._on_gpu:
            self._host_gradient.copy_(model.gradient, non_blocking=True)
        value = float(loss.detach())  # waits for the device's stream, the copy included
        correct = -1
        if outputs.ndim == 2 and targets.ndim == 1:
            correct = int((outputs.detach().argmax(dim=1) == targets).sum())
        # Looked at here, where P workers share the cost, rather than on the server's path.
        is_finite = (
            bool(torch.isfinite(model.gradient).all()) and value == value and abs(value) != float("inf")
        )
        self._pending = (
            Clock(
                iteration=grant.iteration,
                version=version,
                samples=grant.count,
                correct=correct,
                loss=value,
                is_finite=is_finite,
                pull_retries=retries,
                data_s=self._computing_from - pulled_at,
                pull_s=pulled_at - self._began_at,
            ),
            True,
        )
        target_s = self._straggler.target_s(self._transport.worker, grant.iteration)
        self._push_not_before = self._began_at + target_s

    def _push_when_padded(self) -> Progress:
        assert self._pending is not None
        now = self._transport.now()
        if now < self._push_not_before:
            return Progress.PADDING
        clock, has_gradient = self._pending
        self._pending = None
        if has_gradient:
            clock = replace(clock, compute_s=now - self._computing_from)
        self._transport.push(self._gradient_view if has_gradient else None, clock)
        self.iterations += 1
        return Progress.ADVANCED


def run(worker: Worker, backoff: Backoff) -> None:
    """Drive one worker until the server says stop, sleeping wherever it can only wait."""
    while (progress := worker.step()) is not Progress.DONE:
        if progress is Progress.ADVANCED:
            backoff.reset()
        elif progress is Progress.PADDING:
            time.sleep(worker.padding_left_s)
        else:
            backoff.wait()
