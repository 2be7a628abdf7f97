"""What a simulated cluster is: plain numbers, nothing that happens on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hydssp.errors import UserError
from hydssp.simulation.times import IterationTimes
from hydssp.straggler import NoStraggler, Straggler


@dataclass(frozen=True)
class Network:
    """The way between the server and its workers.

    Attributes:
        clock_s: Seconds from the end of a push until its clock message lies before the server.
        grant_s: Seconds from sending a grant until the worker sees it.
        pull_s: Seconds of a pull beside its time on the link.
        push_s: The same of a push.
        bandwidth: Bytes per second of the server's link in each direction, shared by all workers, first come first
            served; None: transfers take no time on it.
    """

    clock_s: float = 0.0
    grant_s: float = 0.0
    pull_s: float = 0.0
    push_s: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        for key in ("clock_s", "grant_s", "pull_s", "push_s"):
            _require(f"network.{key}", getattr(self, key))
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise UserError(
                f"simulate.network.bandwidth={self.bandwidth}: allowed is a number of bytes per second above 0, or null"
            )


@dataclass(frozen=True)
class ServerCosts:
    """What the server's work takes.

    Attributes:
        handle_s: Seconds per push: message, decision, grant.
        apply_s: Seconds per update.
        poll_s: Longest pause between two looks of an idle server, which handles together what it finds; it begins with
            shorter ones. 0: no pause.
    """

    handle_s: float = 0.0
    apply_s: float = 0.0
    poll_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("handle_s", "apply_s", "poll_s"):
            _require(f"server.{key}", getattr(self, key))


@dataclass(frozen=True)
class Crash:
    """A worker that never ends an iteration, and is taken out ``detected_after_s`` seconds after its grant."""

    worker: int
    at_iteration: int
    detected_after_s: float = 10.0

    def __post_init__(self) -> None:
        for key in ("worker", "at_iteration"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UserError(f"simulate.crashes: {key}={value!r}: allowed are integers of 0 or more")
        _require("crashes: detected_after_s", self.detected_after_s)


@dataclass(frozen=True)
class Cluster:
    """Server, workers and network of one simulated run.

    Attributes:
        num_workers: P.
        times: Computing times.
        seed: Of what is drawn from ``times``.
        straggler: Pads iterations as on real ranks.
        network: Between server and workers.
        server: The server's work.
        model_bytes: Of one transfer of all weights.
        push_bytes: Of one gradient; None: as many.
        slots: Versions that the server keeps readable.
        crashes: Workers that fail, at most one entry each.

    Raises:
        UserError: When the parts do not fit the number of workers.
    """

    num_workers: int
    times: IterationTimes
    seed: int = 0
    straggler: Straggler = field(default_factory=NoStraggler)
    network: Network = field(default_factory=Network)
    server: ServerCosts = field(default_factory=ServerCosts)
    model_bytes: float = 0.0
    push_bytes: float | None = None
    slots: int = 4
    crashes: tuple[Crash, ...] = ()

    @property
    def gradient_bytes(self) -> float:
        """Of one transfer of a gradient."""
        return self.model_bytes if self.push_bytes is None else self.push_bytes

    def __post_init__(self) -> None:
        self.times.check(self.num_workers)
        self.straggler.check(self.num_workers)
        failing = [crash.worker for crash in self.crashes]
        for worker in failing:
            if worker >= self.num_workers or failing.count(worker) > 1:
                raise UserError(
                    f"simulate.crashes: worker={worker}: allowed is each of 0 to {self.num_workers - 1} at most once"
                )


def _require(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise UserError(f"simulate.{key}={value!r}: allowed are finite numbers of 0 or more (seconds)")
