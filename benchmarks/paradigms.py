"""Paradigms side by side on one machine, with emulated slow workers: rates, waits, staleness, accuracy.

    python benchmarks/paradigms.py            # permanent speed differences, and one long stall (about 4 minutes)
    python benchmarks/paradigms.py --fashion  # Fashion-MNIST with LeNet, two epochs each (about 3 minutes)

Every line is a run of ``mpirun -np 4 python -m hydssp.train`` (one server, three workers). Workers are slowed down by
sleeping, so that the rates do not depend on how fast or how busy the machine is. Rates are in pushes per second; the
ratios beside them compare runs of this one command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PARADIGMS = ("bsp", "ssp", "dssp_bounded", "dssp_paper", "dssp", "asp")


def train(folder: Path, name: str, *overrides: str, ranks: int = 4) -> dict:
    """One run; returns its summary."""
    launcher = Path(sys.executable).with_name("mpirun")
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=True).stdout
    flags = [] if "HYDRA" in version else ["--oversubscribe"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_osc": "^ucx"}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [
        launcher,
        *flags,
        "-np",
        str(ranks),
        sys.executable,
        "-m",
        "hydssp.train",
        f"run_dir={folder / name}",
    ]
    done = subprocess.run(
        [*command, *overrides], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return json.loads((folder / name / "summary.json").read_text())


def row(name: str, summary: dict, reference: float) -> str:
    """One line of the table."""
    pushes = "/".join(str(worker["pushes"]) for worker in summary["by_worker"])
    waits = [times["wait"] / max(sum(times.values()), 1e-9) for times in summary["time_s_by_worker"]]
    return (
        f"{name:13} {summary['pushes_per_s']:7.2f} {summary['pushes_per_s'] / reference:7.3f}  {pushes:>13}  "
        f"{'/'.join(f'{wait:.0%}' for wait in waits):>12}  {summary['staleness']['mean']:6.2f} "
        f"{summary['staleness']['max']:6}  {summary['lead_max']:6}  {summary['final_accuracy']:.4f}"
    )


def table(title: str, summaries: dict[str, dict]) -> None:
    """All lines, rates relative to ASP's."""
    print(f"\n{title}")
    print("paradigm      pushes/s  / asp   pushes by worker  waiting  stale.   max  lead max  accuracy")
    for name, summary in summaries.items():
        print(row(name, summary, summaries["asp"]["pushes_per_s"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fashion", action="store_true", help="accuracy on Fashion-MNIST instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.fashion:
            options = ("data=fashion_mnist", "model=lenet", "epochs=2")
            runs = {p: train(folder, p, f"paradigm={p}", *options) for p in PARADIGMS}
            table("Fashion-MNIST, LeNet, 2 epochs, batch 32, lr 0.02, momentum 0.9", runs)
            return
        options = ("straggler=constant", "epochs=null", "max_time_s=33")
        runs = {p: train(folder, p, f"paradigm={p}", *options) for p in PARADIGMS}
        table("digits, iterations of 50, 50 and 125 ms, 33 s", runs)
        rate = {name: summary["pushes_per_s"] for name, summary in runs.items()}
        print(f"dssp / asp {rate['dssp'] / rate['asp']:.3f} (at least 0.95 wanted)")
        for name in ("ssp", "dssp_bounded"):
            print(f"{name} / bsp {rate[name] / rate['bsp']:.3f} (0.95 to 1.05 wanted)")
        options = ("straggler=stall", "epochs=null", "max_time_s=15")
        runs = {p: train(folder, f"stall_{p}", f"paradigm={p}", *options) for p in ("ssp", "dssp", "asp")}
        table("digits, iterations of 50 ms, worker 0 stalls once for 5 s, 15 s", runs)
        stale = {name: summary["staleness"]["max"] for name, summary in runs.items()}
        print(f"largest staleness dssp / asp {stale['dssp'] / stale['asp']:.3f} (at most 0.5 wanted)")


if __name__ == "__main__":
    main()
