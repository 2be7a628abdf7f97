"""Evaluation beside the training loop or after it, in a child process without MPI.

One job: give the accuracy and loss of pinned copies of the weights on the test data while the server goes on. A
thread would fight the server for the interpreter lock; a child shares nothing but a block of memory with the copy. The
child reads one task from its standard input, then one line per request, and ends when its input does, so that it
cannot outlive the server. It never imports mpi4py.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import pickle
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from hydssp import abort
from hydssp.errors import TrainingError
from hydssp.evaluator import Evaluation, Pinned, Request
from hydssp.update.buffers import ModuleBuffers, recalibrate
from hydssp.update.layout import FlatModule

if TYPE_CHECKING:
    from hydssp.backward import Loss

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class EvaluationTask:
    """What the child evaluates.

    Attributes:
        model: Module and flat weights, on the CPU.
        buffers: The module's buffers.
        batches: ``(start, count)`` to inputs and targets of the test data.
        num_samples: Size of the test data.
        loss: Mean loss of a batch.
        calibration: Training inputs for ``recalibrate`` before every evaluation; None: no recalibration.
    """

    model: FlatModule
    buffers: ModuleBuffers
    batches: Callable[[int, int], Batch]
    num_samples: int
    loss: Loss
    calibration: Callable[[], list[torch.Tensor]] | None = None


def evaluate(task: EvaluationTask, batch_size: int = 500) -> tuple[float, float]:
    """Accuracy and mean loss of the model as it stands.

    Args:
        task: The model is left in evaluation mode.
        batch_size: Samples at a time.

    Returns:
        Accuracy in 0..1 (nan where outputs are not class scores) and the mean loss.
    """
    correct, total_loss, has_classes = 0, 0.0, True
    task.model.module.eval()
    with torch.no_grad():
        for start in range(0, task.num_samples, batch_size):
            count = min(batch_size, task.num_samples - start)
            inputs, targets = task.batches(start, count)
            outputs = task.model.module(inputs)
            total_loss += float(task.loss(outputs, targets)) * count
            has_classes = has_classes and outputs.ndim == 2 and targets.ndim == 1
            if has_classes:
                correct += int((outputs.argmax(dim=1) == targets).sum())
    return (correct / task.num_samples if has_classes else math.nan), total_loss / task.num_samples


def evaluate_pinned(
    task: EvaluationTask, pinned: Pinned, calibration: list[torch.Tensor]
) -> tuple[float, float]:
    """Accuracy and mean loss of pinned weights and buffers; recalibrated buffers are written back to ``pinned``."""
    task.model.weights.copy_(torch.from_numpy(pinned.weights))
    task.buffers.write(pinned.buffers)
    if calibration:
        recalibrate(task.model.module, calibration)
        task.buffers.read(pinned.buffers)
    return evaluate(task)


def _shared_memory(num_bytes: int) -> int:
    """A file descriptor of memory that a child process can map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hydssp-weights", 0)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def _views(memory: Any, numel: int, dtype: np.dtype, num_buffers: int) -> Pinned:
    """The two vectors in a block of memory: buffers first, which keeps both aligned."""
    buffers = np.frombuffer(memory, np.float64, num_buffers)
    return Pinned(np.frombuffer(memory, dtype, numel, offset=8 * num_buffers), buffers)


class ChildEvaluator:
    """Evaluates in one child process, one request at a time.

    Args:
        make_task: Picklable; called in the child.
        numel: Elements of the weight vector.
        dtype: Their numpy dtype.
        num_buffers: Elements of the buffers.

    Raises:
        TrainingError: From ``begin`` and ``poll`` when the child has ended; its traceback is on standard error.
    """

    def __init__(
        self, make_task: Callable[[], EvaluationTask], numel: int, dtype: np.dtype, num_buffers: int = 0
    ) -> None:
        num_bytes = 8 * num_buffers + numel * dtype.itemsize
        descriptor = _shared_memory(num_bytes)
        self._pinned = _views(mmap.mmap(descriptor, num_bytes), numel, dtype, num_buffers)
        self._request: Request | None = None
        self._child = subprocess.Popen(
            [sys.executable, "-m", "hydssp.evaluation", str(descriptor), str(num_buffers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the server, which decides when to end
        )
        os.close(descriptor)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._input, self._output = self._child.stdin, self._child.stdout
        os.set_blocking(self._output.fileno(), False)
        self._line = b""
        self._is_ready = False
        self._send(pickle.dumps(make_task))

    @property
    def is_busy(self) -> bool:
        """A request is under way."""
        return self._request is not None

    @property
    def is_ready(self) -> bool:
        """See ``Evaluator.is_ready``."""
        if not self._is_ready:
            self._is_ready = self._read_line() is not None
        return self._is_ready

    @property
    def num_pending(self) -> int:
        """0 or 1."""
        return int(self.is_busy)

    @property
    def buffers(self) -> np.ndarray:
        """See ``Evaluator.buffers``."""
        return self._pinned.buffers

    def submit(self, request: Request) -> Pinned:
        """See ``Evaluator.submit``."""
        assert self._request is None
        self._request = request
        return self._pinned

    def begin(self) -> None:
        """See ``Evaluator.begin``."""
        self._send(b"evaluate\n")

    def poll(self) -> Evaluation | None:
        """See ``Evaluator.poll``."""
        if self._request is None or not self.is_ready or (line := self._read_line()) is None:
            return None
        result = json.loads(line)
        request, self._request = self._request, None
        return Evaluation(request, result["accuracy"], result["loss"])

    def training_ended(self) -> None:
        """Changes nothing."""

    def close(self) -> None:
        """End the child; idempotent."""
        if not self._input.closed:
            self._child.kill()
            self._child.wait()
            with contextlib.suppress(BrokenPipeError):  # of a request in the buffer that nobody waits for
                self._input.close()
            self._output.close()

    def _read_line(self) -> bytes | None:
        """The child's next line if it is there whole."""
        if b"\n" not in self._line:
            piece = self._output.read(4096)
            if piece == b"":
                self._raise_ended()
            self._line += piece or b""
        line, end, rest = self._line.partition(b"\n")
        if not end:
            return None
        self._line = rest
        return line

    def _send(self, message: bytes) -> None:
        try:
            self._input.write(message)
            self._input.flush()
        except BrokenPipeError:
            self._raise_ended()

    def _raise_ended(self) -> NoReturn:
        raise TrainingError(
            f"the evaluation process ended with code {self._child.wait()}; its own message stands above"
        )


class SnapshotEvaluator:
    """Keeps snapshots in files while training goes on, and evaluates them when it has ended.

    Args:
        make_child: Starts the process that evaluates.
        folder: Where the snapshots go; each is deleted when it has been evaluated.
        numel: Elements of the weight vector.
        dtype: Their numpy dtype.
        num_buffers: Elements of the buffers.
    """

    def __init__(
        self,
        make_child: Callable[[], ChildEvaluator],
        folder: Path,
        numel: int,
        dtype: np.dtype,
        num_buffers: int = 0,
    ) -> None:
        self._make_child = make_child
        self._folder = folder
        self._sizes = (numel, dtype, num_buffers)
        self._num_bytes = 8 * num_buffers + numel * dtype.itemsize
        self._waiting: deque[tuple[Request, Path]] = deque()
        self._child: ChildEvaluator | None = None

    @property
    def is_busy(self) -> bool:
        """Never: a snapshot can always be stored."""
        return False

    @property
    def is_ready(self) -> bool:
        """Always: nothing is evaluated before training has ended."""
        return True

    @property
    def num_pending(self) -> int:
        """Snapshots without a result."""
        return len(self._waiting) + (self._child.num_pending if self._child else 0)

    @property
    def buffers(self) -> np.ndarray:
        """See ``Evaluator.buffers``."""
        assert self._child is not None
        return self._child.buffers

    def submit(self, request: Request) -> Pinned:
        """A new file's memory."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"version_{request.version}.raw"
        self._waiting.append((request, path))
        return self._map(path, "w+b")

    def begin(self) -> None:
        """Nothing is begun before training has ended."""

    def poll(self) -> Evaluation | None:
        """After training: results, in the order of the snapshots."""
        if self._child is None:
            return None
        result = self._child.poll()
        if not self._child.is_busy and self._waiting:
            request, path = self._waiting.popleft()
            stored, pinned = self._map(path, "r+b"), self._child.submit(request)
            pinned.weights[:] = stored.weights
            pinned.buffers[:] = stored.buffers
            self._child.begin()
            path.unlink()
        return result

    def training_ended(self) -> None:
        """Start the process that evaluates."""
        self._child = self._child or self._make_child()

    def close(self) -> None:
        """End the process and delete what was not evaluated; idempotent."""
        if self._child is not None:
            self._child.close()
        while self._waiting:
            self._waiting.popleft()[1].unlink(missing_ok=True)
        if self._folder.is_dir():
            self._folder.rmdir()

    def _map(self, path: Path, mode: str) -> Pinned:
        with open(path, mode) as file:
            file.truncate(self._num_bytes)
            return _views(mmap.mmap(file.fileno(), self._num_bytes), *self._sizes)


def _child_main() -> None:
    """Serve requests from standard input until it ends."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the user's model prints must not mix with the results
    descriptor, num_buffers = int(sys.argv[1]), int(sys.argv[2])
    make_task = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(1)
    task: EvaluationTask = make_task()
    layout = task.model.layout
    pinned = _views(mmap.mmap(descriptor, 0), layout.numel, layout.numpy_dtype, num_buffers)
    calibration = task.calibration() if task.calibration else []
    print("ready", file=results)
    for _ in sys.stdin.buffer:
        accuracy, mean_loss = evaluate_pinned(task, pinned, calibration)
        print(json.dumps({"accuracy": accuracy, "loss": mean_loss}), file=results)


if __name__ == "__main__":
    try:
        _child_main()
    except Exception as error:
        sys.exit(f"hydssp: the evaluation process failed\n{abort.explanation(error)}")
