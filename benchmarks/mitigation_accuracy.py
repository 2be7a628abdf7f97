"""Test error under stale gradients, with and without mitigation, in virtual time.

    python benchmarks/mitigation_accuracy.py                   # 1, 8 and 32 workers, three seeds (about 7 minutes)
    python benchmarks/mitigation_accuracy.py --pixels raw      # inputs in 0..1 rather than standardised: harder
    python benchmarks/mitigation_accuracy.py --workers 8 --mitigations none gap_aware --seeds 0

Digits, MLP 64-48-10, ``asp``, the full step per push (``async_weight=one``), lr 0.02, momentum 0.9, batch 32, 40
epochs, computing times with a coefficient of variation of 0.1. Each line gives the mean over the seeds, and every
seed's error, in per cent; a run whose weights become infinite counts as chance, 90 %. The order of the pushes is the
same on every machine; weights differ with the rounding of its processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from hydssp.data import Splits, digits

MITIGATIONS = ("none", "staleness_aware", "gap_aware", "dana", "dana_gap_aware", "delay_compensated")
SETTING = (
    "simulate.train=true", "data=digits", "model=mlp", "model.hidden=[48]", "paradigm=asp", "async_weight=one",
    "optimizer.lr=0.02", "optimizer.momentum=0.9", "batch_size=32", "epochs=40", "cluster.cv=0.1", "events=off",
    "tensorboard=false", "eval.every_epochs=40",
)  # fmt: skip


def raw_digits() -> Splits:
    """The digits with pixels in 0..1."""
    splits = digits()
    train, test = (replace(part, mean=(0.0,), std=(1.0,)) for part in (splits.train, splits.test))
    return replace(splits, train=train, test=test)


def errors(mitigation: str, num_workers: int, seeds: list[int], pixels: str) -> tuple[list[float], float]:
    """Test error of each seed in per cent, and the mean staleness."""
    data = ["data._target_=mitigation_accuracy.raw_digits"] if pixels == "raw" else []
    found, staleness = [], 0.0
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            command = [
                sys.executable, "-m", "hydssp.simulate", *SETTING, *data, f"mitigation={mitigation}",
                f"num_workers={num_workers}", f"seed={seed}", f"run_dir={run}",
            ]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            has_diverged = "not finite" in done.stderr
            if done.returncode and not has_diverged:
                sys.exit(done.stdout + done.stderr)
            summary = json.loads((run / "summary.json").read_text())
        found.append(90.0 if has_diverged else 100.0 * (1.0 - summary["final_accuracy"]))
        staleness = summary["staleness"]["mean"]
    return found, staleness


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--mitigations", nargs="+", default=MITIGATIONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pixels", choices=("standardised", "raw"), default="standardised")
    options = parser.parse_args()
    for num_workers in options.workers:
        print(f"\n{num_workers} workers, {options.pixels} pixels", flush=True)
        print(f"{'mitigation':18} error %  by seed            staleness")
        for mitigation in options.mitigations:
            found, staleness = errors(mitigation, num_workers, options.seeds, options.pixels)
            listed = " ".join(f"{error:5.1f}" for error in found)
            print(f"{mitigation:18} {sum(found) / len(found):7.1f}  {listed:18} {staleness:9.2f}", flush=True)


if __name__ == "__main__":
    main()
