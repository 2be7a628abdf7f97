"""A model's buffers in asynchronous training: running statistics and counters as one vector, and what becomes of them.

One job: gather the buffers of a module in a float64 vector and put them back, and make one set of buffers out of the
workers'. Batch norm's running statistics are not trained: every worker has its own, from the batches that it saw, and
evaluation needs one set. float64 holds float32 and every integer below 2**53 exactly. Buffers that are not part of the
state dict are left alone. Knows no transport.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch
from torch import nn

from hydssp.errors import UserError


class BufferPolicy(Enum):
    """Whose buffers are evaluated and saved.

    ``average`` of the workers' latest, counters rounded; ``worker0``'s; or ``recalibrate``: the average, and the
    statistics of batch norm computed anew from training data with the weights that are evaluated.
    """

    average = "average"
    worker0 = "worker0"
    recalibrate = "recalibrate"


class ModuleBuffers:
    """The persistent buffers of one module, in the order of ``named_buffers()``.

    Attributes:
        numel: Elements of the vector.
        is_integer: Which elements come from integer or bool buffers, shape ``[numel]``.

    Raises:
        UserError: When a buffer is complex.
    """

    def __init__(self, module: nn.Module) -> None:
        persistent = module.state_dict(keep_vars=True)
        self._places: list[tuple[nn.Module, str]] = []
        sizes, kinds = [], []
        for name, buffer in module.named_buffers():
            if name not in persistent:
                continue
            if buffer.is_complex():
                raise UserError(
                    f"model: the buffer {name!r} is {buffer.dtype}; allowed are real and integer buffers"
                )
            owner, _, last = name.rpartition(".")
            self._places.append((module.get_submodule(owner), last))
            sizes.append(buffer.numel())
            kinds.append(not buffer.is_floating_point())
        self.numel = sum(sizes)
        self.is_integer = np.repeat(np.array(kinds, bool), sizes)
        self._bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def read(self, out: np.ndarray) -> None:
        """Copy the buffers into ``out``: 1-D float64, ``numel`` elements."""
        if not self._places:
            return
        parts = [getattr(owner, name).detach().reshape(-1).to(torch.float64) for owner, name in self._places]
        torch.from_numpy(out).copy_(torch.cat(parts))

    def write(self, vector: np.ndarray) -> None:
        """Set the buffers from ``vector``: 1-D float64, ``numel`` elements."""
        for (owner, name), start, stop in zip(self._places, self._bounds[:-1], self._bounds[1:], strict=True):
            buffer = getattr(owner, name)
            buffer.copy_(torch.from_numpy(vector[start:stop]).view(buffer.shape))


class WorkersBuffers:
    """Each worker's latest buffers, and the one set that is made of them.

    Args:
        initial: float64 ``[numel]``: every worker's before its first push.
        num_workers: P.
        policy: Whose count.
        is_integer: bool ``[numel]``: the elements that an average rounds.
    """

    def __init__(
        self, initial: np.ndarray, num_workers: int, policy: BufferPolicy, is_integer: np.ndarray
    ) -> None:
        self._latest = np.tile(initial, (num_workers, 1))
        self._policy = policy
        self._is_integer = is_integer

    def update(self, worker: int, values: np.ndarray) -> None:
        """Keep a copy of ``values``, float64 ``[numel]``, as the worker's latest."""
        self._latest[worker] = values

    def combined(self) -> np.ndarray:
        """One set of buffers, float64 ``[numel]``."""
        if self._policy is BufferPolicy.worker0:
            return np.array(self._latest[0])
        mean: np.ndarray = self._latest.mean(axis=0)
        mean[self._is_integer] = np.rint(mean[self._is_integer])
        return mean


def recalibrate(module: nn.Module, batches: list[torch.Tensor]) -> None:
    """Compute batch norm's running statistics anew: the mean over ``batches`` of each batch's own.

    Args:
        module: Left in evaluation mode.
        batches: Inputs, each ``[B, ...]``; a module without batch norm runs none of them.
    """
    norms = [
        m
        for m in module.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    if norms and batches:
        momenta = [m.momentum for m in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # cumulative mean
        module.eval()
        for norm in norms:
            norm.train()  # only these: dropout and the like stay as in evaluation
        with torch.no_grad():
            for inputs in batches:
                module(inputs)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    module.eval()
