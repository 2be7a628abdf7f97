"""What each format of a push costs: bytes, the worker's time to make it and the server's to apply it.

    python benchmarks/wire.py                       # 1 and 11 million parameters (about a minute)
    python benchmarks/wire.py --ratios 0.001 0.1

The worker's part is what comes between the gradient and its put: packing, and error feedback (adding what was lost
before, and finding out what is lost now). The server's part is one update of fused SGD with momentum from the packed
vector, without publication. All formats are timed in turn within each repetition, in processor time of one thread; the
median over the repetitions is shown, and the ratio of the server's part to that of fp32. Transport is not in it: at how
many bytes per second a shorter push pays for itself follows from the table.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from hydssp.update.compression import Quantized, TopK
from hydssp.update.step import ChunkedOptimizer
from hydssp.update.updater import Contribution
from hydssp.update.wire import Wire


class Push:
    """One format at both ends."""

    def __init__(self, wire: Wire, gradient: torch.Tensor, *, has_feedback: bool) -> None:
        self.wire, self.gradient = wire, gradient
        numel = len(gradient)
        self.out = torch.empty(wire.size(numel), dtype=wire.dtype)
        self.lost = torch.zeros(numel) if has_feedback else None
        self.vector = torch.empty(numel)
        self.optimizer = ChunkedOptimizer(
            torch.randn(numel),
            lambda groups: torch.optim.SGD(groups, lr=1e-4, momentum=0.9, fused=True),
            [(0, numel, {})],
            wire=wire,
        )
        self.travelling = self.wire.array(self.out)
        self.iteration = 0

    def pack(self) -> None:
        """The worker's part, as ``worker.Worker`` does it; fp32 travels as it is."""
        if self.wire.is_plain:
            self.travelling = self.gradient.numpy()
            return
        vector = self.gradient
        if self.lost is not None:
            vector = torch.add(self.gradient, self.lost, out=self.vector)
        self.wire.pack(vector, self.out, (0, self.iteration))
        if self.lost is not None:
            self.wire.unpack(self.out, 0, self.lost)
            torch.sub(vector, self.lost, out=self.lost)
        self.iteration += 1

    def apply(self) -> None:
        """The server's part."""
        self.optimizer.step([Contribution(0, self.travelling, 1.0, 0)], 1.0, lambda a, b: None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, nargs="+", default=[1_000_000, 11_000_000])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.01])
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread")
    for numel in options.numel:
        gradient = torch.from_numpy(0.01 * np.random.default_rng(0).standard_normal(numel, dtype=np.float32))
        pushes = {
            "fp32": Push(Wire("fp32"), gradient, has_feedback=False),
            "bf16": Push(Wire("bf16"), gradient, has_feedback=False),
            "bf16, error feedback": Push(Wire("bf16"), gradient, has_feedback=True),
            "fp16": Push(Wire("fp16"), gradient, has_feedback=False),
            **{f"topk {r:g}": Push(TopK(numel, r), gradient, has_feedback=True) for r in options.ratios},
            **{f"quantize {b}": Push(Quantized(numel, b), gradient, has_feedback=True) for b in (8, 4)},
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in pushes}
        for repetition in range(options.repetitions + 1):
            for name, push in pushes.items():
                began_at = time.thread_time()
                push.pack()
                packed_at = time.thread_time()
                push.apply()
                if repetition:  # the first one gets the memory
                    times[name].append((packed_at - began_at, time.thread_time() - packed_at))
        print(f"\n{numel:,} parameters    bytes each   worker, ms   server, ms    x fp32")
        for name, push in pushes.items():
            packing, applying = (statistics.median(part) for part in zip(*times[name], strict=True))
            ratio = statistics.median(a[1] / b[1] for a, b in zip(times[name], times["fp32"], strict=True))
            each = push.travelling.nbytes / numel
            print(
                f"{name:22} {each:11.3f} {packing * 1e3:12.2f} {applying * 1e3:12.2f} {ratio:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
