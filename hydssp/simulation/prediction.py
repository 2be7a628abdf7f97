"""What a paradigm would give on a cluster: one short simulated run of clocks, and the few figures that decide.

One job: from a recording to a cluster, from a cluster and a paradigm to figures. Knows no torch and no Hydra.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from hydssp.simulation.recording import Recording, answers_s, full_pushes, read_recording
from hydssp.simulation.times import Measured
from hydssp.transport.backoff import SLEEP_MAX_S

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

    Computing times are replayed worker by worker, with what grant, pull and push took more or less than their means:
    without that jitter equally fast workers would stay in step. From a push until the server has seen it passes the way
    of the message and, evenly distributed, up to the time between two looks of the server; the quartiles tell both,
    because a busy node disturbs them least.

    Raises:
        UserError: When a worker has pushed nothing.
    """
    pushes = full_pushes(recording)
    if not pushes or not recording.apply_s:
        raise UserError(f"{recording.path}: the recorded run made no update; choose one that did")
    mean = {key: _mean([push[key] for push in pushes]) for key in ("grant", "pull", "push")}
    computing_s: list[list[float]] = [[] for _ in range(recording.num_workers)]
    for push in pushes:
        jitter_s = math.fsum(push[key] - mean[key] for key in mean)
        computing_s[push["w"]].append(max(0.0, push["data"] + push["compute"] + jitter_s))
    seen_s = sorted(max(0.0, push["t"] - push["at"]) for push in pushes)
    lower_s, median_s, upper_s = (seen_s[len(seen_s) * quarter // 4] for quarter in (1, 2, 3))
    poll_s = min(2 * (upper_s - lower_s), SLEEP_MAX_S)  # a busy node spreads them further than any pause
    apply_s = _mean(recording.apply_s)
    return Cluster(
        recording.num_workers,
        Measured(computing_s),
        network=Network(
            clock_s=max(0.0, median_s - poll_s / 2),
            grant_s=mean["grant"],
            pull_s=mean["pull"],
            push_s=mean["push"],
        ),
        server=ServerCosts(
            handle_s=max(0.0, _mean(answers_s(recording)) - apply_s),
            apply_s=apply_s,
            poll_s=poll_s,
        ),
        slots=recording.config["transport"]["slots"],
    )


def measured_times(run: str) -> Measured:
    """The computing times in the run folder ``run``.

    Raises:
        UserError: When there is no run with a complete event log, or a worker has pushed nothing.
    """
    times = cluster_of(read_recording("cluster.run", run)).times
    assert isinstance(times, Measured)
    return times


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


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
    ended = run_clocks(
        cluster, coordinator, dealer, Limits(max_time_s=max_time_s, max_updates=max(1, updates)), recorder
    )
    return recorder.summary(ended.at, "done", f"reached {ended.by}")
