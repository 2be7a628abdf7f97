"""Samples for the tests of loader processes; needs no torch, so that the processes start quickly."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass

import numpy as np

from hydssp.errors import UserError

NUM_SAMPLES = 40


@dataclass
class Plain:
    """Each sample is three random numbers around its number, and its number."""

    seconds: float = 0.0

    def gather(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self.seconds * len(indices))
        return np.stack([np.random.default_rng((epoch, i)).random(3) + i for i in indices]), indices


class Witness:
    """Says what the process is that it is read in."""

    def gather(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        is_main_another = not str(sys.modules["__main__"].__file__).endswith("loader_process.py")
        loaded = [name in sys.modules for name in ("mpi4py", "hydra", "torch")]
        facts = [os.getpid(), os.getppid(), is_main_another, *loaded, os.environ["OMP_NUM_THREADS"] == "1"]
        return np.array([facts] * len(indices)), indices


class Oddities:
    def gather(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if 3 in indices:
            raise UserError("data: sample 3 is bad")
        if 4 in indices:
            raise CannotBePickledError(lambda: None)
        if 5 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        if 6 in indices:
            raise CannotBeUnpickledError(1, 2)
        if 7 in indices:
            return np.array([object()]), indices
        return indices, indices


class CannotBePickledError(Exception):
    pass


class CannotBeUnpickledError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
