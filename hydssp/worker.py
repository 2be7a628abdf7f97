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
from typing import Protocol

import numpy as np
import psutil
import torch

from hydssp.backward import Backward
from hydssp.straggler import Straggler
from hydssp.transport.backoff import Backoff
from hydssp.transport.messages import Clock, Grant
from hydssp.transport.protocol import WorkerTransport
from hydssp.update.buffers import ModuleBuffers
from hydssp.update.layout import FlatModule
from hydssp.update.wire import Wire


class Batches(Protocol):
    """Where the worker's batches come from."""

    def __call__(self, epoch: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of that range of the epoch's order, on the worker's device."""

    def prefetch(self, epoch: int, start: int, count: int) -> None:
        """This range will most likely be asked for next."""


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
        backward: Computes with ``model`` what is pushed.
        straggler: How long an iteration shall take at least.
        buffers: The module's buffers, which travel with every push.
        pull_wire: The format in which weights come; None: as they are.
        push_wire: The format in which the gradient goes; None: as it is.
        error_feedback: What the rounding of a push lost is added to the next one.
        stop_code: Asked at every push: the exit code that a signal to this rank wants, 0 for none.
    """

    def __init__(
        self,
        transport: WorkerTransport,
        model: FlatModule,
        batches: Batches,
        backward: Backward,
        straggler: Straggler,
        buffers: ModuleBuffers | None = None,
        pull_wire: Wire | None = None,
        push_wire: Wire | None = None,
        error_feedback: bool = False,
        stop_code: Callable[[], int] = lambda: 0,
    ) -> None:
        self.iterations = 0
        self.doing = Progress.WAITING_FOR_GRANT
        self._transport = transport
        self._model = model
        self._batches = batches
        self._backward = backward
        self._straggler = straggler
        self._buffers = buffers if buffers is not None and buffers.numel else None
        self._buffers_vector = np.zeros(self._buffers.numel if self._buffers else 0)
        self._stop_code = stop_code
        self._process = psutil.Process()
        self._measured_at = -1.0
        self._memory_bytes = 0
        pull_wire = pull_wire or Wire("fp32", model.layout.dtype)
        self._push_wire = push_wire or Wire("fp32", model.layout.dtype)
        self._lost: dict[int, torch.Tensor] | None = {} if error_feedback else None
        # The transport moves host memory. On a GPU it is pinned and copied from and to; on a CPU it is the model's own
        # vectors, so that a pull writes straight into the weights, unless the wire has another format.
        self._on_gpu = model.weights.device.type == "cuda"
        numel, pinned = model.layout.numel, self._on_gpu
        self._outgoing = backward.vector
        if not self._push_wire.is_plain:
            self._outgoing = torch.empty(numel, dtype=self._push_wire.dtype, device=model.weights.device)
        self._host_weights, self._host_gradient = model.weights, self._outgoing
        if self._on_gpu or not pull_wire.is_plain:
            self._host_weights = torch.empty(numel, dtype=pull_wire.dtype, pin_memory=pinned)
        if self._on_gpu:
            self._host_gradient = torch.empty(numel, dtype=self._push_wire.dtype, pin_memory=pinned)
        self._weights_view = pull_wire.array(self._host_weights)
        self._gradient_view = self._push_wire.array(self._host_gradient)
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
        if self._host_weights is not self._model.weights:
            self._model.weights.copy_(self._host_weights, non_blocking=True)
        if grant.next_count:
            self._batches.prefetch(grant.next_epoch, grant.next_start, grant.next_count)
        pulled_at = now()
        inputs, targets = self._batches(grant.epoch, grant.start, grant.count)
        self._computing_from = now()
        passed = self._backward.run(inputs, targets, grant.lr_factor, self._transport.worker)
        is_finite = passed.is_finite if passed.is_skipped else self._encode(passed.is_finite)
        value = float(passed.loss)  # waits for the device's stream, the copy included
        self._pending = (
            Clock(
                iteration=grant.iteration,
                version=version,
                samples=grant.count,
                correct=-1 if passed.correct is None else int(passed.correct),
                loss=value,
                is_finite=bool(is_finite),
                is_skipped=passed.is_skipped,
                pull_retries=retries,
                data_s=self._computing_from - pulled_at,
                pull_s=pulled_at - self._began_at,
            ),
            not passed.is_skipped,
        )
        target_s = self._straggler.target_s(self._transport.worker, grant.iteration)
        self._push_not_before = self._began_at + target_s

    def _encode(self, is_finite: torch.Tensor) -> torch.Tensor:
        """Bring the computed vector into the form in which it is pushed; returns whether it is finite in that, too."""
        vector, outgoing = self._backward.vector, self._outgoing
        lost = None
        if self._lost is not None:
            worker = self._transport.worker
            lost = self._lost.get(worker)
            if lost is None:
                lost = self._lost[worker] = torch.zeros_like(vector)
            vector.add_(lost)
        if outgoing is not vector:
            outgoing.copy_(vector)
            is_finite = is_finite & torch.isfinite(outgoing).all()
        if self._on_gpu:
            self._host_gradient.copy_(outgoing, non_blocking=True)
        if lost is not None and is_finite:  # what is refused loses nothing and brings nothing
            torch.sub(vector, outgoing, out=lost)
        return is_finite

    def _push_when_padded(self) -> Progress:
        assert self._pending is not None
        now = self._transport.now()
        if now < self._push_not_before:
            return Progress.PADDING
        clock, has_gradient = self._pending
        self._pending = None
        clock = replace(
            clock,
            compute_s=now - self._computing_from if clock.samples else 0.0,
            cpu_s=time.process_time(),
            memory_bytes=self._memory(now),
            device_bytes=torch.cuda.memory_allocated() if self._on_gpu else 0,
            stop_code=self._stop_code(),
        )
        if has_gradient:
            if self._buffers is not None:
                self._buffers.read(self._buffers_vector)
            self._transport.push(self._gradient_view, clock, self._buffers_vector if self._buffers else None)
        else:
            self._transport.push(None, clock)
        self.iterations += 1
        return Progress.ADVANCED

    def _memory(self, now: float) -> int:
        """Resident memory, bytes, looked up once a second."""
        if now - self._measured_at >= 1.0 or self._measured_at < 0:
            self._measured_at = now
            self._memory_bytes = self._process.memory_info().rss
        return self._memory_bytes


def run(worker: Worker, backoff: Backoff, patience_s: float) -> None:
    """Drive one worker until the server says stop, sleeping wherever it can only wait.

    Args:
        worker: The worker.
        backoff: How it sleeps.
        patience_s: Seconds without a grant after which the server is given up. Longer than the server's own limit for
            a worker that does not push, which is the usual reason for a long wait and is named there.

    Raises:
        RuntimeError: When no grant came for that long.
    """
    waiting_since = time.monotonic()
    while (progress := worker.step()) is not Progress.DONE:
        if progress is Progress.WAITING_FOR_GRANT:
            backoff.wait()
            if time.monotonic() - waiting_since > patience_s:
                raise RuntimeError(
                    f"no answer from the server (rank 0) for {patience_s:.0f} s, after {worker.iterations} iterations"
                )
            continue
        waiting_since = time.monotonic()
        if progress is Progress.ADVANCED:
            backoff.reset()
        else:
            time.sleep(worker.padding_left_s)
