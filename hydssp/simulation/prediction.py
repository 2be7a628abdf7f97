"""What a paradigm would give on a cluster: one short simulated run of clocks, and the few figures that decide.

One job: from a recording to a cluster, from a cluster and a paradigm to figures. Knows no torch and no Hydra.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hydssp.coordination.coordinator import Coordinator
from hydssp.coordination.paradigms import Paradigm
from hydssp.coordination.ranges import RangeDealer
from hydssp.errors import UserError
from hydssp.observe.recorder import Recorder
from hydssp.server import Limits
from hydssp.simulation.clocks import run_clocks
from hydssp.simulation.cluster import Cluster, Network, ServerCosts
from hydssp.simulation.recording import Recording, answer_s, computing_s
from hydssp.simulation.times import Measured

MAX_PUSHES = 20_000
"""Of one prediction: some seconds of computing."""
_ENDLESS = 1 << 62


@dataclass(frozen=True)
class Figures:
    """What came out of a run, real or simulated.

    Attributes:
        pushes_per_s: Of all workers.
        wait_share: Of the workers' time, 0 .. 1: mean over workers.
        staleness_mean: Versions.
        staleness_p99: Versions.
        staleness_max: Versions.
    """

    pushes_per_s: float
    wait_share: float
    staleness_mean: float
    staleness_p99: int
    staleness_max: int

    @classmethod
    def of(cls, summary: dict[str, Any]) -> Figures:
        """The figures of a ``summary.json``."""
        shares = []
        for times in summary["time_s_by_worker"]:
            total = math.fsum(times.values())
            shares.append(times["wait"] / total if total else 0.0)
        staleness = summary["staleness"]
        return cls(
            summary["pushes_per_s"] or 0.0,
            math.fsum(shares) / len(shares),
            staleness["mean"] or 0.0,
            staleness["p99"] or 0,
            staleness["max"] or 0,
        )


def cluster_of(recording: Recording) -> Cluster:
    """The cluster that a run was recorded on, as far as its log tells.

    Computing times are replayed worker by worker. Pull, push and the answer to a push take their means; of the answer
    what the server's work does not explain is taken for the way, half for each direction.

    Raises:
        UserError: When a worker has pushed nothing.
    """
    full = [push for push in recording.pushes if push["n"]]
    if not full or not recording.apply_s:
        raise UserError(f"{recording.path}: the recorded run made no update; choose one that did")
    apply_s = math.fsum(recording.apply_s) / len(recording.apply_s)
    pushes_per_update = len(full) / len(recording.apply_s)
    handled_s = answer_s(recording)
    handle_s = max(0.0, min(handled_s - apply_s, _handle_s(recording)))
    way_s = max(0.0, handled_s - handle_s - (apply_s if pushes_per_update < 1.5 else 0.0))
    return Cluster(
        recording.num_workers,
        Measured(computing_s(recording)),
        network=Network(
            latency_s=way_s / 2,
            pull_s=math.fsum(push["pull"] for push in full) / len(full),
            push_s=math.fsum(push["push"] for push in full) / len(full),
        ),
        server=ServerCosts(handle_s, apply_s),
        slots=recording.config["transport"]["slots"],
    )


def _handle_s(recording: Recording) -> float:
    """What a push costs the server: seconds between the decision and the last grant sent, updates left out."""
    spent = [
        call.releases[-1]["t"] - call.now
        for call in recording.calls
        if call.kind == "pushes" and len(call.pushes) == 1 and call.releases
    ]
    if not spent:
        return 0.0
    return max(0.0, math.fsum(spent) / len(spent) - math.fsum(recording.apply_s) / len(recording.apply_s))


def predict(
    cluster: Cluster, paradigm: Paradigm, max_time_s: float, recorder: Recorder | None = None
) -> dict[str, Any]:
    """Simulate ``paradigm`` on ``cluster``.

    Args:
        cluster: What it runs on.
        paradigm: Who may go on.
        max_time_s: Virtual seconds; the run ends earlier at ``MAX_PUSHES`` updates.
        recorder: Told of everything, not started; None: one that keeps nothing.

    Returns:
        The summary.
    """
    coordinator = Coordinator(paradigm, cluster.num_workers)
    recorder = recorder or Recorder(None, paradigm="", summary_s=math.inf)
    recorder.started(0.0, cluster.num_workers)
    dealer = RangeDealer(_ENDLESS, 1, rounds=paradigm.is_synchronous)
    updates = MAX_PUSHES // (cluster.num_workers if paradigm.is_synchronous else 1)
    ended_by, now = run_clocks(
        cluster, coordinator, dealer, Limits(max_time_s=max_time_s, max_updates=max(1, updates)), recorder
    )
    return recorder.summary(now, "done", f"reached {ended_by}")
