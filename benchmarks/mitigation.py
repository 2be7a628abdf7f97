"""What each mitigation costs the server: time per update from one push, and memory, beside plain fused SGD.

    python benchmarks/mitigation.py                 # 1 and 11 million parameters (about 2 minutes)
    python benchmarks/mitigation.py --workers 16 --threads 4

SGD with momentum, ``fused``; the workers push in turn, so that every gradient is as stale as there are other workers
and old weights are kept for each of them. All methods are timed in turn within each repetition, and the ratio to
``none`` is the median over the repetitions. Times are processor time of the one thread (wall time with more threads):
other programs on the machine then count only through the caches. What is timed is the update alone, without its
publication. Memory is what one element of the model takes at the server beside the weights themselves: E, momenta and
copies of old weights, in bytes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from hydssp.update.dana import Dana, DanaGapAware
from hydssp.update.gap_aware import GapAware
from hydssp.update.mitigation import DelayCompensated, Mitigation, StalenessAware
from hydssp.update.step import ChunkedOptimizer
from hydssp.update.updater import Contribution

METHODS: dict[str, Callable[[], Mitigation]] = {
    "none": Mitigation,
    "staleness_aware": StalenessAware,
    "gap_aware": GapAware,
    "gap_aware, tensor": lambda: GapAware("tensor"),
    "gap_aware, scalar": lambda: GapAware("scalar"),
    "gap_aware, compiled": lambda: GapAware(compiled=True),
    "dana": Dana,
    "dana_gap_aware": DanaGapAware,
    "dana_gap_aware, compiled": lambda: DanaGapAware(compiled=True),
    "delay_compensated": DelayCompensated,
    "delay_compensated, adaptive": lambda: DelayCompensated(adaptive=True),
}
TENSORS = 60


def tensor_bytes() -> int:
    """Bytes of all tensors in this process, memory that is shared counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Pushes:
    """One method's server side, pushed to by the workers in turn."""

    def __init__(self, mitigation: Mitigation, numel: int, gradients: list[np.ndarray]) -> None:
        before = tensor_bytes()
        self.gradients = gradients
        bounds = np.linspace(0, numel, TENSORS + 1, dtype=int)
        self.optimizer = ChunkedOptimizer(
            torch.randn(numel),
            lambda groups: torch.optim.SGD(groups, lr=1e-4, momentum=0.9, fused=True),
            [(0, numel, {})],
            mitigation=mitigation,
            num_workers=len(gradients),
            tensors=list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)),
        )
        self.version = 0
        self.granted = [0] * len(gradients)
        for worker in range(len(gradients)):
            self.optimizer.granted(worker)
        for _ in range(2 * len(gradients)):
            self.push()
        self.bytes_per_element = (tensor_bytes() - before) / numel - 4

    def push(self) -> None:
        """The next worker's."""
        worker = self.version % len(self.gradients)
        staleness = self.version - self.granted[worker]
        self.optimizer.step(
            [Contribution(worker, self.gradients[worker], 1.0, staleness)], 1.0, lambda a, b: None
        )
        self.version += 1
        self.granted[worker] = self.version
        self.optimizer.granted(worker)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, nargs="+", default=[1_000_000, 11_000_000])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.workers} workers")
    for numel in options.numel:
        draw = np.random.default_rng(0)
        gradients = [0.01 * draw.standard_normal(numel, dtype=np.float32) for _ in range(options.workers)]
        runs = {name: Pushes(METHODS[name](), numel, gradients) for name in options.methods}
        times: dict[str, list[float]] = {name: [] for name in runs}
        pushes = max(options.workers, 8_000_000 // numel)
        for _ in range(options.repetitions):
            for name, run in runs.items():
                began_at = clock()
                for _ in range(pushes):
                    run.push()
                times[name].append((clock() - began_at) / pushes)
        print(f"\n{numel:,} parameters{'':12} ms per push    x none   bytes per element")
        for name, run in runs.items():
            ratio = statistics.median(a / b for a, b in zip(times[name], times["none"], strict=True))
            best = statistics.median(times[name])
            print(f"{name:30} {best * 1e3:11.3f}  {ratio:8.2f}   {run.bytes_per_element:17.1f}", flush=True)


if __name__ == "__main__":
    main()
