"""Virtual time: a transport whose clock jumps from event to event, and the loop that drives a server over it.

One job: say *when* things happen on a described cluster. What happens is the business of the real ``Server`` on one
side and of a ``Computation`` on the other: this file decides nothing and computes no gradient. The order is a function
of the cluster alone; events at the same instant come in the order in which they were caused.

An iteration of worker w, in seconds of virtual time::

    grant sent --grant_s--> seen --pull--> pulled --computing, padded--> computed --push--> pushed --clock_s--> received

The server handles what has been received whenever it is free; ``handle_s`` per push and ``apply_s`` per update make it
busy, so that it saturates as a real one does. Cost per push: two or four entries of a heap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from hydssp.errors import TrainingError
from hydssp.server import Server
from hydssp.simulation.cluster import Cluster
from hydssp.transport.messages import Clock, Grant, Pushed

_DOUBLINGS = 4
"""From the shortest pause of an idle server to its longest, about as in ``transport.backoff``."""
# Kinds of events. A number and not an Enum: they are compared a few million times.
_GRANTED, _PULLED, _COMPUTED, _RECEIVED, _FAILED, _LIMIT, _SERVER = range(7)


@dataclass(slots=True)
class Iteration:
    """One iteration of one worker; times are seconds of virtual time."""

    worker: int
    grant: Grant
    seen_at: float
    version: int
    """Version of the weights that the worker reads; known from ``pulled_at`` on."""
    pulled_at: float = math.nan
    computed_at: float = math.nan
    pushed_at: float = math.nan
    received_at: float = math.nan


class Computation(Protocol):
    """What the workers compute."""

    def compute(self, iteration: Iteration) -> tuple[Clock, np.ndarray | None, np.ndarray | None]:
        """The clock message, the gradient and the buffers of an iteration whose times are all known.

        Called in the order in which pushes are received. Gradient and buffers may be reused by the next call.
        """


class TimesOnly:
    """A ``Computation`` of nothing: clock messages without a gradient behind them."""

    def compute(self, iteration: Iteration) -> tuple[Clock, np.ndarray | None, np.ndarray | None]:
        """See ``Computation``."""
        return clock_of(iteration), None, None


def clock_of(iteration: Iteration) -> Clock:
    """The clock message of an iteration, as far as times and counts go."""
    return Clock(
        iteration.grant.iteration,
        iteration.version,
        iteration.grant.count,
        pull_s=iteration.pulled_at - iteration.seen_at,
        compute_s=iteration.computed_at - iteration.pulled_at,
        push_s=iteration.pushed_at - iteration.computed_at,
    )


class _Pool:
    """Arrays of one size that are used again."""

    def __init__(self, numel: int, dtype: Any) -> None:
        self._numel = numel
        self._dtype = dtype
        self._free: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        return self._free.pop() if self._free else np.empty(self._numel, self._dtype)

    def give_back(self, array: np.ndarray) -> None:
        self._free.append(array)


def _backed_off(idle_s: float, poll_s: float) -> float:
    """When a server that became idle looks for what came ``idle_s`` after that: pauses double up to ``poll_s``."""
    if idle_s <= 0 or not poll_s:
        return max(0.0, idle_s)
    shortest = poll_s / (1 << _DOUBLINGS)
    grown = shortest * ((1 << _DOUBLINGS) - 1)
    if idle_s <= grown:
        return shortest * ((1 << math.ceil(math.log2(idle_s / shortest + 1))) - 1)
    return grown + math.ceil((idle_s - grown) / poll_s) * poll_s


class Fabric:
    """The server's end of a transport in virtual time (a ``ServerTransport``), with the cluster behind it.

    Of the weights only the versions that some worker still needs are kept, of gradients only those that the server has
    not released.

    Args:
        cluster: What is simulated.
        computation: What the workers compute.
        numel: Elements of the weight vector; 0: there are no weights.
        dtype: Their numpy dtype as they travel.
        num_buffers: Elements of each worker's buffers.
        push_dtype: That of the gradients as they travel; None: ``dtype``.
        push_numel: Elements of a gradient as it travels; None: ``numel``.
    """

    def __init__(
        self,
        cluster: Cluster,
        computation: Computation,
        numel: int = 0,
        dtype: Any = np.float32,
        num_buffers: int = 0,
        push_dtype: Any = None,
        push_numel: int | None = None,
    ) -> None:
        self.num_workers = cluster.num_workers
        self.numel = numel
        self.num_buffers = num_buffers
        self.versions_kept_max = 0
        """Most versions of the weights kept at a time."""
        self._cluster = cluster
        self._computation = computation
        network = cluster.network
        self._pull_transfer_s = cluster.model_bytes / network.bandwidth if network.bandwidth else 0.0
        self._push_transfer_s = cluster.gradient_bytes / network.bandwidth if network.bandwidth else 0.0
        self._streams: list[Iterator[float]] = [
            cluster.times.stream(worker, cluster.seed) for worker in range(cluster.num_workers)
        ]
        self._crashes = {(c.worker, c.at_iteration): c for c in cluster.crashes}
        self._time = 0.0
        self._server_free_at = 0.0
        self._out_free_at = 0.0
        self._in_free_at = 0.0
        self._agenda: list[tuple[float, int, int, Any]] = []
        self._num_events = 0
        self._inbox: list[Iteration] = []
        self._newest = -1
        self._pool = _Pool(numel, dtype)
        self._gradient_pool = _Pool(
            numel if push_numel is None else push_numel, dtype if push_dtype is None else push_dtype
        )
        self._nothing = np.empty(0, dtype)
        self._opened: np.ndarray | None = None
        self._weights: dict[int, np.ndarray] = {}
        self._needed: dict[int, int] = {}
        """Version -> granted workers that have not pushed yet; the newest counts once more."""
        self._gradients: dict[int, np.ndarray] = {}
        self._buffers = np.zeros((cluster.num_workers, num_buffers))

    # --- the server's end ----------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds of virtual time."""
        return self._time

    def progress(self) -> None:
        """Nothing to do."""

    def begin_publish(self, version: int) -> np.ndarray:
        """See ``ServerTransport``."""
        assert version == self._newest + 1
        self._opened = self._pool.take()
        return self._opened

    def end_publish(self) -> None:
        """See ``ServerTransport``; an update takes its time here."""
        assert self._opened is not None
        previous, self._newest = self._newest, self._newest + 1
        if previous >= 0:
            self._time += self._cluster.server.apply_s
        if not self.numel:
            self._pool.give_back(self._opened)
            return
        self._weights[self._newest] = self._opened
        self._needed[self._newest] = 1
        if previous >= 0:
            self._release(previous)
        self.versions_kept_max = max(self.versions_kept_max, len(self._weights))

    def gradient(self, worker: int) -> np.ndarray:
        """See ``ServerTransport``."""
        return self._gradients[worker] if self.numel else self._nothing

    def buffers(self, worker: int) -> np.ndarray:
        """See ``ServerTransport``."""
        row: np.ndarray = self._buffers[worker]
        return row

    def receive(self) -> list[Pushed]:
        """See ``ServerTransport``."""
        if not self._inbox:
            return []
        iterations, self._inbox = self._inbox, []
        if len(iterations) > 1:
            iterations.sort(key=attrgetter("worker"))
        return [Pushed(i.worker, self._compute(i), i.seen_at, i.pushed_at, i.received_at) for i in iterations]

    def grant(self, worker: int, grant: Grant) -> None:
        """See ``ServerTransport``; the handling of a push takes its time here."""
        if grant.stop:
            return  # its gradient stays: the round that it belongs to may not be complete
        if self.numel and (gradient := self._gradients.pop(worker, None)) is not None:
            self._gradient_pool.give_back(gradient)
        network = self._cluster.network
        self._time += self._cluster.server.handle_s
        seen_at = self._time + network.grant_s
        iteration = Iteration(worker, grant, seen_at, grant.version)
        if self.numel:
            self._needed[grant.version] += 1
        if grant.count == 0:
            iteration.pulled_at = iteration.computed_at = iteration.pushed_at = seen_at
            self._receive_later(iteration)
        elif self._pull_transfer_s:
            self._plan(seen_at, _GRANTED, iteration)
        else:
            self._plan(seen_at + network.pull_s, _PULLED, iteration)

    def close(self) -> None:
        """Nothing to free."""

    # --- the workers' side ---------------------------------------------------------------------------------

    def weights(self, version: int) -> np.ndarray:
        """A version that a granted worker may read."""
        return self._weights[version]

    def _release(self, version: int) -> None:
        self._needed[version] -= 1
        if not self._needed[version]:
            del self._needed[version]
            self._pool.give_back(self._weights.pop(version))

    def _compute(self, iteration: Iteration) -> Clock:
        clock, gradient, buffers = self._computation.compute(iteration)
        if self.numel:
            slot = self._gradients[iteration.worker] = self._gradient_pool.take()
            if gradient is not None:
                slot[:] = gradient
            if buffers is not None:
                self._buffers[iteration.worker] = buffers
            self._release(iteration.version)
        return clock

    def _begin_pull(self, iteration: Iteration) -> None:
        begins_at = max(self._time, self._out_free_at)
        self._out_free_at = begins_at + self._pull_transfer_s
        self._plan(self._out_free_at + self._cluster.network.pull_s, _PULLED, iteration)

    def _begin_computing(self, iteration: Iteration) -> None:
        cluster, worker, number = self._cluster, iteration.worker, iteration.grant.iteration
        iteration.pulled_at = now = self._time
        if self._newest - iteration.version >= cluster.slots - 1:  # its slot has been overwritten meanwhile
            if self.numel:
                self._release(iteration.version)
                self._needed[self._newest] += 1
            iteration.version = self._newest
        if self._crashes and (crash := self._crashes.get((worker, number))) is not None:
            self._plan(max(now, iteration.seen_at + crash.detected_after_s), _FAILED, iteration)
            return
        computed_at = now + next(self._streams[worker])
        padded = iteration.seen_at + cluster.straggler.target_s(worker, number)
        iteration.computed_at = padded if padded > computed_at else computed_at
        if self._push_transfer_s:
            self._plan(iteration.computed_at, _COMPUTED, iteration)
        else:
            iteration.pushed_at = iteration.computed_at + cluster.network.push_s
            self._receive_later(iteration)

    def _begin_push(self, iteration: Iteration) -> None:
        begins_at = max(self._time, self._in_free_at)
        self._in_free_at = begins_at + self._push_transfer_s
        iteration.pushed_at = self._in_free_at + self._cluster.network.push_s
        self._receive_later(iteration)

    def _receive_later(self, iteration: Iteration) -> None:
        iteration.received_at = iteration.pushed_at + self._cluster.network.clock_s
        self._plan(iteration.received_at, _RECEIVED, iteration)

    # --- the loop ------------------------------------------------------------------------------------------

    def _plan(self, at: float, kind: int, iteration: Iteration | None) -> None:
        self._num_events += 1
        heappush(self._agenda, (at, self._num_events, kind, iteration))

    def run(self, server: Server, wake_at: float | None = None) -> None:
        """Drive ``server`` until every worker has left.

        Args:
            server: Made with this fabric as its transport.
            wake_at: A time at which the server looks at its limits even if no push comes; None: no such time.

        Raises:
            TrainingError: What the server raises, and when nobody computes any more.
        """
        agenda, poll_s = self._agenda, self._cluster.server.poll_s
        server.start()
        self._server_free_at = self._time
        if wake_at is not None:
            self._plan(self._time + wake_at, _LIMIT, None)
        is_due = False  # whether the server's next look is on the agenda
        while not server.is_done:
            if not agenda:
                raise TrainingError("nobody computes any more, and the run has not ended")
            at, _, kind, iteration = heappop(agenda)
            self._time = at
            if kind == _PULLED:
                self._begin_computing(iteration)
                continue
            if kind == _RECEIVED:
                self._inbox.append(iteration)
            elif kind == _GRANTED:
                self._begin_pull(iteration)
                continue
            elif kind == _COMPUTED:
                self._begin_push(iteration)
                continue
            elif kind == _FAILED:
                self._fail(iteration, server)
                continue
            elif kind == _SERVER:
                is_due = False
            # The server looks when it is free, and then at all that has come by that time.
            if at < self._server_free_at or (poll_s and kind != _SERVER) or (agenda and agenda[0][0] <= at):
                if not is_due:
                    is_due = True
                    looks_after_s = _backed_off(at - self._server_free_at, poll_s)
                    self._plan(max(at, self._server_free_at + looks_after_s), _SERVER, None)
                continue
            server.step()
            self._server_free_at = self._time

    def _fail(self, iteration: Iteration, server: Server) -> None:
        self._time = max(self._time, self._server_free_at)
        if self.numel:
            self._release(iteration.version)
        crash = self._crashes[iteration.worker, iteration.grant.iteration]
        server.fail([iteration.worker], f"a simulated crash in iteration {crash.at_iteration}")
        self._server_free_at = self._time
