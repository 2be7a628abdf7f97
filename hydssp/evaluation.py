"""Evaluation beside the training loop, in a child process without MPI.

One job: give the accuracy and loss of a pinned copy of the weights on the test data while the server goes on. A
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hydssp.update.layout import FlatModule


@dataclass(frozen=True)
class Request:
    """What was pinned: the version, when (seconds, server's clock), and the samples trained on by then."""

    version: int
    pinned_at: float
    samples: int


@dataclass(frozen=True)
class Evaluation:
    """The result for one request: accuracy in 0..1 (nan where it has no meaning) and mean loss per sample."""

    request: Request
    accuracy: float
    loss: float


class Evaluator(Protocol):
    """Where the server sends weights to be evaluated."""

    @property
    def is_busy(self) -> bool:
        """A request is under way; the next ``submit`` would be an error."""

    def submit(self, request: Request) -> np.ndarray:
        """Begin a request; returns the memory for the weights, to be filled before ``begin``."""

    def begin(self) -> None:
        """The weights are in place: evaluate them."""

    def poll(self) -> Evaluation | None:
        """The result when it is there; never blocks."""

    def close(self) -> None:
        """End it; idempotent."""


Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EvaluationTask = tuple[FlatModule, Callable[[int, int], Batch], int, Loss]
"""Model, ``(start, count)`` to a batch of the test data, number of test samples, and loss."""


def evaluate(
    model: FlatModule,
    batches: Callable[[int, int], Batch],
    num_samples: int,
    loss: Loss,
    batch_size: int = 500,
) -> tuple[float, float]:
    """Accuracy and mean loss of ``model`` as it stands.

    Args:
        model: Its module is put into evaluation mode and back.
        batches: ``(start, count)`` to inputs and targets.
        num_samples: Size of the test data.
        loss: Mean loss of a batch.
        batch_size: Samples at a time.

    Returns:
        Accuracy in 0..1 (nan where outputs are not class scores) and the mean loss.
    """
    correct, total_loss, has_classes = 0, 0.0, True
    model.module.eval()
    with torch.no_grad():
        for start in range(0, num_samples, batch_size):
            count = min(batch_size, num_samples - start)
            inputs, targets = batches(start, count)
            outputs = model.module(inputs)
            total_loss += float(loss(outputs, targets)) * count
            has_classes = has_classes and outputs.ndim == 2 and targets.ndim == 1
            if has_classes:
                correct += int((outputs.argmax(dim=1) == targets).sum())
    model.module.train()
    return (correct / num_samples if has_classes else math.nan), total_loss / num_samples


def _shared_memory(num_bytes: int) -> int:
    """A file descriptor of memory that a child process can map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hydssp-weights", 0)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


class ChildEvaluator:
    """Evaluates in one child process, one request at a time.

    Args:
        make_task: Picklable; called in the child, gives ``(model, batches, num_samples, loss)`` for ``evaluate``.
        numel: Elements of the weight vector.
        dtype: Their numpy dtype.

    Raises:
        RuntimeError: From ``poll`` when the child has ended; its traceback is on standard error.
    """

    def __init__(self, make_task: Callable[[], EvaluationTask], numel: int, dtype: np.dtype) -> None:
        descriptor = _shared_memory(numel * dtype.itemsize)
        self._memory = mmap.mmap(descriptor, numel * dtype.itemsize)
        self._weights = np.frombuffer(self._memory, dtype=dtype)
        self._request: Request | None = None
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "hydssp.evaluation", str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
            env=environment,
        )
        os.close(descriptor)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._input, self._output = self._child.stdin, self._child.stdout
        pickle.dump(make_task, self._input)
        self._input.flush()
        os.set_blocking(self._output.fileno(), False)
        self._line = b""

    @property
    def is_busy(self) -> bool:
        """A request is under way."""
        return self._request is not None

    def submit(self, request: Request) -> np.ndarray:
        """See ``Evaluator.submit``."""
        assert self._request is None
        self._request = request
        return self._weights

    def begin(self) -> None:
        """See ``Evaluator.begin``."""
        try:
            self._input.write(b"evaluate\n")
            self._input.flush()
        except BrokenPipeError:
            self._raise_ended()

    def poll(self) -> Evaluation | None:
        """See ``Evaluator.poll``."""
        if self._request is None:
            return None
        piece = self._output.read(4096)
        if piece == b"":
            self._raise_ended()
        self._line += piece or b""
        if not self._line.endswith(b"\n"):
            return None
        result, self._line = json.loads(self._line), b""
        request, self._request = self._request, None
        return Evaluation(request, result["accuracy"], result["loss"])

    def close(self) -> None:
        """End the child; idempotent."""
        if not self._input.closed:
            self._child.kill()
            self._child.wait()
            with contextlib.suppress(BrokenPipeError):  # of a request in the buffer that nobody waits for
                self._input.close()
            self._output.close()

    def _raise_ended(self) -> None:
        raise RuntimeError(
            f"the evaluation process ended with code {self._child.wait()}; its own message stands above"
        )


def _child_main() -> None:
    """Serve requests from standard input until it ends."""
    import signal

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the server decides when to end
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the user's model prints must not mix with the results
    make_task = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(1)
    model, batches, num_samples, loss = make_task()
    memory = mmap.mmap(int(sys.argv[1]), 0)
    weights = torch.from_numpy(np.frombuffer(memory, dtype=model.layout.numpy_dtype))
    for _ in sys.stdin.buffer:
        model.weights.copy_(weights)
        accuracy, mean_loss = evaluate(model, batches, num_samples, loss)
        print(json.dumps({"accuracy": accuracy, "loss": mean_loss}), file=results)


if __name__ == "__main__":
    _child_main()
