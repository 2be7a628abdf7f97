"""One simulated run of clocks alone: the real server on a simulated cluster, with neither weights nor gradients.

One job: connect the parts and give back the summary. Knows no torch and no Hydra.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hydssp.coordination.coordinator import Coordinator
from hydssp.coordination.ranges import Dealer
from hydssp.errors import TrainingError
from hydssp.observe.recorder import Recorder
from hydssp.server import Limits, Server, StepRule
from hydssp.simulation.cluster import Cluster
from hydssp.simulation.fabric import Fabric, TimesOnly
from hydssp.update.schedule import Constant, LrClock
from hydssp.update.updater import Contribution, Effect


class NoUpdate:
    """An ``Updater`` of nothing."""

    values = np.empty(0, np.float32)
    chunk_numel = 1
    learning_rate = 0.0

    def granted(self, worker: int) -> None:
        """Of no consequence."""

    def step(
        self,
        contributions: Sequence[Contribution],
        lr_factor: float,
        after_chunk: Callable[[int, int], None],
    ) -> Sequence[Effect]:
        """Change nothing."""
        return ()


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        by: Why it ended early; "" if it did not.
        exit_code: What a signal asked for, else 0.
        at: When its last worker left, seconds.
    """

    by: str
    exit_code: int
    at: float


def run_clocks(
    cluster: Cluster,
    coordinator: Coordinator,
    dealer: Dealer,
    limits: Limits,
    recorder: Recorder,
    stop_code: Callable[[], int] = lambda: 0,
) -> Ended:
    """Simulate until every worker has left.

    Args:
        cluster: What it runs on.
        coordinator: A new one for the cluster's number of workers.
        dealer: Deals batch ranges, made for the cluster's number of workers.
        limits: When to end early, in virtual time.
        recorder: Told of everything, ``started`` already at time 0.
        stop_code: The exit code that a signal wants, 0 for none.

    Returns:
        How the run ended.

    Raises:
        TrainingError: When a limit that means failure is passed; the summary is written then.
    """
    fabric = Fabric(cluster, TimesOnly())
    server = Server(
        transport=fabric,
        coordinator=coordinator,
        dealer=dealer,
        optimizer=NoUpdate(),
        step_rule=StepRule(Constant(), LrClock.samples, 1.0, is_mean=False, batch_size=1, num_samples=1),
        evaluator=None,
        evaluate_every=np.inf,
        recorder=recorder,
        limits=limits,
        stop_code=stop_code,
    )
    try:
        fabric.run(server, limits.max_time_s)
    except TrainingError as error:
        recorder.write_summary(fabric.now(), "failed", str(error))
        raise
    return Ended(server.ended_by, server.exit_code, fabric.now())
