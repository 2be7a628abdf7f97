"""Does virtual time tell the truth? One cluster for real and simulated: rates, waits and staleness beside each other.

    python benchmarks/fidelity.py [SECONDS]    # default 25 for each paradigm, about 3 minutes in all

Real: ``mpirun -np 4 python -m hydssp.train`` with iterations of 50, 50 and 125 ms (emulated by sleep). Simulated: the
same paradigms on the computing times and costs that the *ASP* run recorded, so that all but ASP are predictions. The
clusters of the two are the same, the runs are not: what differs in the fourth digit is chance.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from paradigms import train

from hydssp.coordination.paradigms import ASP, BSP, DSSP, SSP
from hydssp.simulation.prediction import Figures, cluster_of, predict
from hydssp.simulation.recording import read_recording

PARADIGMS = {"bsp": BSP(), "ssp": SSP(), "dssp": DSSP(), "asp": ASP()}


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 25.0
    real, simulated = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in PARADIGMS:
            real[name] = train(
                Path(temporary), name, f"paradigm={name}", "epochs=null", f"max_time_s={seconds}", "straggler=constant",
                "straggler.factors=[1,1,2.5]", "straggler.iteration_s=0.05", "eval.every_epochs=1000",
            )  # fmt: skip
        cluster = cluster_of(read_recording("run", str(Path(temporary) / "asp")))
    for name, paradigm in PARADIGMS.items():
        simulated[name] = predict(cluster, paradigm, seconds)

    network, server = cluster.network, cluster.server
    print(
        f"recorded costs in ms: clock message {network.clock_s * 1e3:.3f}, grant {network.grant_s * 1e3:.3f}, pull "
        f"{network.pull_s * 1e3:.3f}, push {network.push_s * 1e3:.3f}, handling {server.handle_s * 1e3:.3f}, update "
        f"{server.apply_s * 1e3:.3f}, time between two looks {server.poll_s * 1e3:.3f}\n"
    )
    print("            pushes/s              waiting       staleness, mean            99 %      max")
    print("          real  simulated       real  sim.      real    sim.            real sim.   real sim.")
    worst_rate = worst_staleness = 0.0
    for name in PARADIGMS:
        a, b = Figures.of(real[name]), Figures.of(simulated[name])
        rate = b.pushes_per_s / a.pushes_per_s - 1
        staleness = (
            b.staleness_mean / a.staleness_mean - 1 if a.staleness_mean else float(b.staleness_mean != 0)
        )
        worst_rate, worst_staleness = max(worst_rate, abs(rate)), max(worst_staleness, abs(staleness))
        print(
            f"{name:6s} {a.pushes_per_s:7.2f} {b.pushes_per_s:7.2f} {rate:+6.1%}  {a.wait_share:6.0%} "
            f"{b.wait_share:6.0%}  {a.staleness_mean:8.2f} {b.staleness_mean:7.2f} {staleness:+6.1%} "
            f"{a.staleness_p99:7d} {b.staleness_p99:4d} {a.staleness_max:6d} {b.staleness_max:4d}"
        )
    print(
        f"largest difference of a rate {worst_rate:.1%} (below 5 % wanted), of a mean staleness {worst_staleness:.1%} "
        "(below 10 % wanted)"
    )
    sys.exit(worst_rate >= 0.05 or worst_staleness >= 0.1)


if __name__ == "__main__":
    main()
