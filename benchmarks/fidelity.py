"""Does virtual time tell the truth? One cluster for real and simulated: rates, waits and staleness beside each other.

    python benchmarks/fidelity.py [RUNS] [SECONDS]    # default 3 runs of 20 s of each paradigm, about 6 minutes in all
    python benchmarks/fidelity.py 1 15 1,1.15,2.5     # other factors than 1,1,2.5

Real: ``mpirun -np 4 python -m hydssp.train`` with iterations of 50 ms times the factors (emulated by sleep).
Simulated: the same paradigms on the computing times and costs that the *ASP* run recorded, so that all but ASP are
predictions. Figures are means over the runs: two equally fast workers keep the distance at which they happen to start
for a long time, and with it the staleness of a single run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import fmean

from paradigms import train

from hydssp.coordination.paradigms import ASP, BSP, DSSP, SSP
from hydssp.simulation.prediction import Figures, cluster_of, predict
from hydssp.simulation.recording import read_recording

PARADIGMS = {"asp": ASP(), "bsp": BSP(), "ssp": SSP(), "dssp": DSSP()}


def one_run(seconds: float, factors: str) -> dict[str, tuple[Figures, Figures]]:
    """Every paradigm once: real and simulated."""
    with tempfile.TemporaryDirectory() as temporary:
        real = {
            name: train(
                Path(temporary), name, f"paradigm={name}", "epochs=null", f"max_time_s={seconds}", "straggler=constant",
                f"straggler.factors=[{factors}]", "straggler.iteration_s=0.05", "eval.every_epochs=1000",
            )
            for name in PARADIGMS
        }  # fmt: skip
        cluster = cluster_of(read_recording("run", str(Path(temporary) / "asp")))
    network, server = cluster.network, cluster.server
    print(
        f"recorded costs in ms: clock message {network.clock_s * 1e3:.3f}, grant {network.grant_s * 1e3:.3f}, pull "
        f"{network.pull_s * 1e3:.3f}, push {network.push_s * 1e3:.3f}, handling {server.handle_s * 1e3:.3f}, update "
        f"{server.apply_s * 1e3:.3f}, longest pause of the server {server.poll_s * 1e3:.3f}",
        flush=True,
    )
    return {
        name: (Figures.of(real[name]), Figures.of(predict(cluster, paradigm, seconds)))
        for name, paradigm in PARADIGMS.items()
    }


def difference(real: float, simulated: float) -> float:
    """Relative; 0 where both are 0."""
    return simulated / real - 1 if real else float(simulated != 0)


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    factors = sys.argv[3] if len(sys.argv) > 3 else "1,1,2.5"
    runs = [one_run(seconds, factors) for _ in range(num_runs)]
    print("\n            pushes/s               waiting       staleness, mean           (each real run)")
    print("          real simulated          real  sim.      real simulated")
    worst = [0.0, 0.0]
    for name in PARADIGMS:
        pairs = [run[name] for run in runs]
        rates, waits, stale = (
            [fmean(getattr(pair[side], key) for pair in pairs) for side in (0, 1)]
            for key in ("pushes_per_s", "wait_share", "staleness_mean")
        )
        differences = difference(*rates), difference(*stale)
        worst = [max(w, abs(d)) for w, d in zip(worst, differences, strict=True)]
        each = ", ".join(f"{real.staleness_mean:.2f}" for real, _ in pairs)
        print(
            f"{name:6s} {rates[0]:7.2f} {rates[1]:7.2f} {differences[0]:+6.1%}  {waits[0]:8.0%} {waits[1]:5.0%}  "
            f"{stale[0]:8.2f} {stale[1]:7.2f} {differences[1]:+6.1%}   {each}"
        )
    print(
        f"largest difference of a rate {worst[0]:.1%} (below 5 % wanted), of a staleness {worst[1]:.1%} (below 10 %)"
    )
    sys.exit(worst[0] >= 0.05 or worst[1] >= 0.1)


if __name__ == "__main__":
    main()
