"""Which paradigm to choose on a cluster: the candidates simulated, ranked, and one recommended with the reason.

One job: judge figures. Knows no torch and no Hydra.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydssp.coordination.paradigms import ASP, BSP, DSSP, SSP, Paradigm
from hydssp.simulation.cluster import Cluster
from hydssp.simulation.prediction import Figures, predict

WORTH_IT = 1.05
"""A rate this much above BSP's is worth stale gradients; and rates within this of each other count as equal."""

CANDIDATES: tuple[tuple[str, Paradigm], ...] = (
    ("paradigm=bsp", BSP()),
    *((f"paradigm=ssp paradigm.s={s}", SSP(s)) for s in (1, 3, 7, 15)),
    ("paradigm=dssp_bounded", DSSP.bounded()),
    *(
        (f"paradigm=dssp paradigm.s_lower={lower} paradigm.s_upper={upper}", DSSP(lower, upper))
        for lower, upper in ((1, 3), (1, 7), (3, 15), (3, 31))
    ),
    ("paradigm=asp", ASP()),
)
"""Override -> paradigm, from the least stale to the most."""


@dataclass(frozen=True)
class Ranked:
    """One candidate: the override that chooses it, its figures, and its rate as a multiple of BSP's."""

    override: str
    figures: Figures
    speedup: float


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        ranking: All candidates, fastest first; among equally fast ones the least stale.
        recommended: The override line.
        reason: Why, in words.
    """

    ranking: tuple[Ranked, ...]
    recommended: str
    reason: str


def advise(
    cluster: Cluster,
    max_time_s: float,
    simulate: Callable[[Cluster, Paradigm, float], Figures] = lambda c, p, t: Figures.of(predict(c, p, t)),
    candidates: Sequence[tuple[str, Paradigm]] = CANDIDATES,
) -> Advice:
    """Try all candidates on ``cluster`` for ``max_time_s`` virtual seconds each; the first must be BSP."""
    figures = [(override, simulate(cluster, paradigm, max_time_s)) for override, paradigm in candidates]
    base = figures[0][1].pushes_per_s
    entries = [Ranked(o, f, f.pushes_per_s / base if base else math.nan) for o, f in figures]
    ranking = sorted(entries, key=lambda r: (-round(r.figures.pushes_per_s, 3), r.figures.staleness_mean))
    best = ranking[0]
    if best.speedup < WORTH_IT:
        return Advice(
            tuple(ranking),
            entries[0].override,
            f"nothing beats BSP here: the fastest, {best.override}, gives {best.speedup:.2f} times its rate, and BSP's "
            "gradients are never stale",
        )
    near = [r for r in entries if r.figures.pushes_per_s * WORTH_IT >= best.figures.pushes_per_s]
    chosen = min(near, key=lambda r: (r.figures.staleness_p99, r.figures.staleness_mean))
    return Advice(
        tuple(ranking),
        chosen.override,
        f"{chosen.speedup:.2f} times BSP's rate, within {WORTH_IT - 1:.0%} of the fastest, with the least stale "
        f"gradients of those (mean {chosen.figures.staleness_mean:.2f}, 99 % up to {chosen.figures.staleness_p99})",
    )


@dataclass(frozen=True)
class Saturation:
    """How many workers one server can feed.

    Attributes:
        pushes_per_s: What the server can handle at most.
        num_workers: Workers of the cluster's mean speed that keep it busy.
        limit: What is exhausted first, in words.
    """

    pushes_per_s: float
    num_workers: float
    limit: str


def saturation(cluster: Cluster, unheld_pushes_per_s: float) -> Saturation:
    """From what a push costs the server and what a transfer costs its link; infinite where neither costs anything.

    Args:
        cluster: With its costs.
        unheld_pushes_per_s: The rate of all workers when nobody is ever held, as under ASP.
    """
    server_s = cluster.server.handle_s + cluster.server.apply_s
    bandwidth = cluster.network.bandwidth
    link_s = max(cluster.model_bytes, cluster.gradient_bytes) / bandwidth if bandwidth else 0.0
    if server_s == link_s == 0:
        return Saturation(math.inf, math.inf, "nothing: server and network cost no time")
    what = (
        f"the server's link, {link_s * 1e3:.3g} ms per transfer"
        if link_s > server_s
        else f"the server's work, {cluster.server.handle_s * 1e3:.3g} ms per push and "
        f"{cluster.server.apply_s * 1e3:.3g} ms per update"
    )
    capacity = 1 / max(server_s, link_s)
    return Saturation(capacity, capacity * cluster.num_workers / unheld_pushes_per_s, what)
