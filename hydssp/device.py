"""Which device and how many threads a rank uses: pure decisions, no torch, no MPI.

What is visible (``CUDA_VISIBLE_DEVICES``) is the site's business and never changed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydssp.errors import UserError


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows of itself; gathered from all ranks before anything is decided.

    Attributes:
        host: Name of the node.
        affinity: Cores that this process may run on.
        num_cuda: CUDA devices that it sees.
    """

    host: str
    affinity: tuple[int, ...]
    num_cuda: int


@dataclass(frozen=True)
class Placement:
    """What one rank uses.

    Attributes:
        device: ``cpu`` or ``cuda:<index among the visible>``.
        num_threads: Compute threads.
        shares_device: Several workers of the node use this GPU.
    """

    device: str
    num_threads: int
    shares_device: bool = False


def place(ranks: Sequence[RankFacts], device: str, num_threads: int | None) -> list[Placement]:
    """Place every rank; the first is the server, which opens no CUDA context.

    A worker's GPU is its index among the *workers* of its node, modulo the GPUs visible to it, so that the server's
    node wastes none.

    Args:
        ranks: Facts of all ranks in rank order.
        device: ``auto`` (a GPU where one is visible), ``cpu`` or ``cuda``.
        num_threads: Compute threads of each rank; None: the cores a rank may use, shared among the ranks on them.

    Raises:
        UserError: When ``cuda`` is wanted and a worker sees no GPU.
    """
    placements = []
    workers_seen: dict[str, int] = {}
    for rank, facts in enumerate(ranks):
        neighbours = [r for r in ranks if r.host == facts.host]
        sharing = sum(r.affinity == facts.affinity for r in neighbours)
        threads = num_threads or max(1, len(facts.affinity) // sharing)
        chosen, shares = "cpu", False
        if rank > 0:
            local_worker = workers_seen.get(facts.host, 0)
            workers_seen[facts.host] = local_worker + 1
            if device == "cuda" and not facts.num_cuda:
                raise UserError(
                    f"device=cuda: rank {rank} on {facts.host} sees no CUDA device; use device=auto or device=cpu, or "
                    "ask the batch system for a GPU on every node with workers"
                )
            if device != "cpu" and facts.num_cuda:
                chosen = f"cuda:{local_worker % facts.num_cuda}"
                shares = sum(r.host == facts.host for r in ranks[1:]) > facts.num_cuda
        placements.append(Placement(chosen, threads, shares))
    return placements
