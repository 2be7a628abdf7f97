"""The paradigms on four simulated clusters: pushes per time unit, and how far others push during one computation.

    python benchmarks/virtual_rates.py [SEEDS]    # default 3; some minutes

Iteration times are gamma distributed around each worker's mean (CV 0.1), network and server cost nothing, s and s_lower
3, s_upper 15, SSP 15; 5,000 time units, 3,000 on the last cluster, whose slowest worker stalls once for 60 units. Rates
are means over the seeds; in brackets the largest staleness of any gradient (for BSP, of rounds, 0). Beside each rate,
its ratio to the figure that this project was designed by, where there is one.
"""

from __future__ import annotations

import math
import sys

from hydssp.coordination.coordinator import Coordinator
from hydssp.coordination.paradigms import ASP, BSP, DSSP, SSP
from hydssp.coordination.ranges import RangeDealer
from hydssp.observe.recorder import Recorder
from hydssp.server import Limits
from hydssp.simulation.clocks import run_clocks
from hydssp.simulation.cluster import Cluster
from hydssp.simulation.times import Gamma
from hydssp.straggler import LongStall, NoStraggler

PARADIGMS = {
    "bsp": BSP(),
    "ssp 15": SSP(15),
    "dssp_bounded": DSSP.bounded(),
    "dssp_paper": DSSP.paper(),
    "dssp": DSSP(),
    "asp": ASP(),
}
CLUSTERS = (
    ((1, 2.06), 5000, NoStraggler(), (0.97, 0.97, 0.97, 1.48, 1.48, 1.49)),
    ((1, 1, 1, 2.5), 5000, NoStraggler(), (1.59, 1.61, 1.60, 2.20, 3.39, 3.40)),
    ((1, 1, 1.2, 1.2, 1.5, 1.5, 2.5, 4), 5000, NoStraggler(), (1.99, 2.02, 2.01, 2.76, 5.61, 5.65)),
    ((1, 1, 1.3, 2), 3000, LongStall(3, 500, 60.0, 0.0), (1.94, 1.97, 1.96, None, 3.17, 3.25)),
)


def rate(paradigm, factors, duration, straggler, seed) -> tuple[float, int]:
    """Pushes per time unit, and the largest staleness."""
    cluster = Cluster(len(factors), Gamma(1.0, 0.1, factors), seed, straggler)
    recorder = Recorder(None, paradigm="", summary_s=math.inf)
    recorder.started(0.0, len(factors))
    dealer = RangeDealer(1 << 40, 1, rounds=paradigm.is_synchronous)
    limits = Limits(max_time_s=duration)
    ended = run_clocks(cluster, Coordinator(paradigm, len(factors)), dealer, limits, recorder)
    summary = recorder.summary(ended.at, "done", "")
    return summary["pushes_per_s"], summary["staleness"]["max"]


def main() -> None:
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    worst = 0.0
    print(f"{'cluster':34s}" + "".join(f"{name:>22s}" for name in PARADIGMS))
    for factors, duration, straggler, wanted in CLUSTERS:
        cells = []
        for paradigm, expected in zip(PARADIGMS.values(), wanted, strict=True):
            results = [rate(paradigm, factors, duration, straggler, seed) for seed in seeds]
            mean = sum(r for r, _ in results) / len(results)
            cell = f"{mean:.3f} ({max(s for _, s in results)})"
            if expected is not None:
                cell += f" {mean / expected:.3f}"
                worst = max(worst, abs(mean / expected - 1))
            cells.append(f"{cell:>22s}")
        stall = ", one stall" if straggler.target_s(3, 500) else ""
        print(f"{', '.join(map(str, factors)) + stall:34s}" + "".join(cells), flush=True)
    print(f"largest deviation {worst:.1%} (at most 3 % wanted)")
    sys.exit(worst > 0.03)


if __name__ == "__main__":
    main()
