"""Does evaluation beside training hold up the workers? Grant latency with and without an evaluation under way.

    python benchmarks/evaluation.py [RANKS]     # default 2: server, one worker and the evaluation process

One run of LeNet on Fashion-MNIST under ASP with padded iterations of 30 ms, evaluated all the time. A grant's latency
is the time from a push (put finished) until the worker sees the grant that answers it; it is *during* an evaluation
when an evaluation was under way at the push. The ratio compares medians of this one run.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from paradigms import train


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as temporary:
        factors = ",".join(["1"] * (ranks - 1))
        train(
            Path(temporary), "run", "data=fashion_mnist", "model=lenet", "paradigm=asp", "epochs=null", "max_time_s=40",
            "straggler=constant", f"straggler.factors=[{factors}]", "straggler.iteration_s=0.03",
            "eval.every_epochs=0.05", ranks=ranks,
        )  # fmt: skip
        folder = Path(temporary) / "run"
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    spans = [(r["pinned_at"], r["t"]) for r in records if r["kind"] == "evaluation"]
    during, without = [], []
    pushed_at: dict[int, float] = {}
    for event in events:
        if event["e"] != "push":
            continue
        if event["w"] in pushed_at:
            at = pushed_at[event["w"]]
            inside = any(begin <= at <= end for begin, end in spans)
            (during if inside else without).append(event["granted"] - at)
        pushed_at[event["w"]] = event["at"]
    for name, latencies in (("during an evaluation", during), ("without", without)):
        cuts = statistics.quantiles(latencies, n=100)
        print(
            f"{name:22} {len(latencies):5} grants, median {1e3 * statistics.median(latencies):.3f} ms, "
            f"90 % {1e3 * cuts[89]:.3f} ms, 99 % {1e3 * cuts[98]:.3f} ms"
        )
    print(f"median, ratio {statistics.median(during) / statistics.median(without):.2f} (at most 3 wanted)")
    share = sum(d <= 3 * statistics.median(without) for d in during) / len(during)
    print(f"grants during an evaluation within 3 times the median without: {share:.1%}")


if __name__ == "__main__":
    main()
