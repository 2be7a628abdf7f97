"""Real gradients in the order of simulated events: the real workers and the real server, one after the other.

One job: let the real ``Worker`` compute what one push carries, whenever the fabric says that the push has come. All
workers share one module, because each pulls its weights afresh; what a worker keeps for itself, its buffers, is put
back before it computes. Knows no clock but the fabric's, no MPI and no Hydra. Bit for bit the same for the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hydssp.evaluation import EvaluationTask, evaluate_pinned
from hydssp.evaluator import Evaluation, Pinned, Request
from hydssp.simulation.fabric import Fabric, Iteration
from hydssp.straggler import Straggler
from hydssp.transport.messages import Clock, Grant
from hydssp.update.buffers import ModuleBuffers
from hydssp.worker import Progress, Worker


class _End:
    """The worker's end of the transport (a ``WorkerTransport``) for one worker at a time."""

    def __init__(self, numel: int, num_buffers: int) -> None:
        self.worker = 0
        self.numel = numel
        self.num_buffers = num_buffers
        self.iteration: Iteration | None = None
        self.source = np.empty(0)
        self.pushed: tuple[Clock, np.ndarray | None, np.ndarray | None] | None = None
        self._time = 0.0
        self._grant: Grant | None = None

    def begin(self, iteration: Iteration, source: np.ndarray) -> None:
        """An iteration of any worker, which reads the weights ``source``."""
        self.worker = iteration.worker
        self.iteration = iteration
        self.source = source
        self.pushed = None
        self._grant = iteration.grant
        self._time = iteration.seen_at

    def now(self) -> float:
        """Virtual time as this iteration sees it."""
        return self._time

    def finish_computing(self) -> None:
        """The time has come at which the worker may push."""
        assert self.iteration is not None
        # A second call comes when the worker's own sum of times is a rounding error above.
        self._time = max(self.iteration.computed_at, math.nextafter(self._time, math.inf))

    def poll_grant(self) -> Grant | None:
        """See ``WorkerTransport``."""
        grant, self._grant = self._grant, None
        return grant

    def pull(self, out: np.ndarray, version: int) -> tuple[int, int]:
        """See ``WorkerTransport``."""
        assert self.iteration is not None
        out[:] = self.source
        self._time = self.iteration.pulled_at
        return self.iteration.version, int(self.iteration.version != version)

    def push(self, gradient: np.ndarray | None, clock: Clock, buffers: np.ndarray | None = None) -> None:
        """See ``WorkerTransport``."""
        self.pushed = (clock, gradient, buffers)

    def close(self) -> None:
        """Nothing to free."""


class _AsSimulated(Straggler):
    """Pads each iteration to what the cluster says that it takes."""

    def __init__(self, end: _End) -> None:
        self._end = end

    def check(self, num_workers: int) -> None:
        """Fits."""

    def target_s(self, worker: int, iteration: int) -> float:
        """Seconds from the grant to the push."""
        assert self._end.iteration is not None
        return self._end.iteration.computed_at - self._end.iteration.seen_at


class Gradients:
    """A ``Computation`` that trains.

    Args:
        make_worker: Makes the worker that stands for all of them, given its end of the transport and its straggler.
        numel: Elements of the weight vector.
        buffers: Of the worker's module.
        num_workers: P.
    """

    def __init__(
        self,
        make_worker: Callable[[_End, Straggler], Worker],
        numel: int,
        buffers: ModuleBuffers,
        num_workers: int,
    ) -> None:
        self._end = _End(numel, buffers.numel)
        self._worker = make_worker(self._end, _AsSimulated(self._end))
        self._buffers = buffers
        initial = np.zeros(buffers.numel)
        buffers.read(initial)
        self._buffers_of = np.tile(initial, (num_workers, 1))
        self.fabric: Fabric | None = None
        """Where the weights are; to be set before the run."""

    def compute(self, iteration: Iteration) -> tuple[Clock, np.ndarray | None, np.ndarray | None]:
        """See ``Computation``."""
        assert self.fabric is not None
        end, worker = self._end, self._worker
        if self._buffers.numel:
            self._buffers.write(self._buffers_of[iteration.worker])
        end.begin(iteration, self.fabric.weights(iteration.version))
        while worker.step() is Progress.PADDING:
            end.finish_computing()
        assert end.pushed is not None
        clock, gradient, buffers = end.pushed
        if buffers is not None:
            self._buffers_of[iteration.worker] = buffers
        return clock, gradient, buffers


class ImmediateEvaluator:
    """Evaluates in this process, at once: in virtual time an evaluation takes none. An ``Evaluator``."""

    is_busy = False
    is_ready = True

    def __init__(self, task: EvaluationTask) -> None:
        self._task = task
        self._calibration = task.calibration() if task.calibration else []
        layout = task.model.layout
        self._pinned = Pinned(np.zeros(layout.numel, layout.numpy_dtype), np.zeros(task.buffers.numel))
        self._request: Request | None = None
        self._result: Evaluation | None = None

    @property
    def num_pending(self) -> int:
        """0 or 1."""
        return int(self._result is not None)

    @property
    def buffers(self) -> np.ndarray:
        """See ``Evaluator``."""
        return self._pinned.buffers

    def submit(self, request: Request) -> Pinned:
        """See ``Evaluator``."""
        self._request = request
        return self._pinned

    def begin(self) -> None:
        """See ``Evaluator``."""
        assert self._request is not None
        accuracy, loss = evaluate_pinned(self._task, self._pinned, self._calibration)
        self._result = Evaluation(self._request, accuracy, loss)

    def poll(self) -> Evaluation | None:
        """See ``Evaluator``."""
        result, self._result = self._result, None
        return result

    def training_ended(self) -> None:
        """Changes nothing."""

    def close(self) -> None:
        """Nothing to end."""
