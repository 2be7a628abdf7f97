"""The order of a recorded run, forced on another one: the same arrivals, decisions and versions again.

One job: stand between a server and its transport and coordinator, so that the server sees what it saw when the run was
recorded, however the real arrivals come. Neither server nor workers know of it. Knows no MPI, no torch and no Hydra.

What makes a run differ from the next one is when pushes arrive. Here a push is kept back until all those that were
handled before it have been; the coordinator is given the recorded times, so that it decides as it did; and a grant is
kept back until the version that its worker then read has been made. With the same configuration the weights are then
the same, up to what the worker's own arithmetic varies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from hydssp.coordination.coordinator import Coordinator
from hydssp.coordination.events import Outcome, Push
from hydssp.coordination.paradigms import Paradigm, Rules
from hydssp.errors import TrainingError
from hydssp.simulation.recording import Recording
from hydssp.transport.messages import Grant, Pushed
from hydssp.transport.protocol import ServerTransport


class ForcedOrder(ServerTransport):
    """A server's end that lets pushes through in the recorded order.

    It lets everything through once all recorded updates have been made, and when the run ends before the recorded one.

    Args:
        transport: The real one.
        recording: The run to be repeated, with as many workers.

    Raises:
        TrainingError: From ``receive``, when a worker did something else than recorded.
    """

    def __init__(self, transport: ServerTransport, recording: Recording) -> None:
        self.num_workers = transport.num_workers
        self.numel = transport.numel
        self.num_buffers = transport.num_buffers
        self._transport = transport
        self._groups = deque(
            tuple(push.worker for push in call.pushes) for call in recording.calls if call.kind == "pushes"
        )
        self._before = {(p["w"], p["it"]): p for p in recording.pushes}
        self._pushes_left = [0] * transport.num_workers
        for push in recording.pushes:
            self._pushes_left[push["w"]] += 1
        self._num_updates = len(recording.apply_s)
        self._is_free = False
        self._newest = -1
        self._arrived: dict[int, Pushed] = {}
        self._kept: dict[int, Grant] = {}

    def now(self) -> float:
        """See ``ServerTransport``."""
        return self._transport.now()

    def progress(self) -> None:
        """See ``ServerTransport``."""
        self._transport.progress()

    def begin_publish(self, version: int) -> np.ndarray:
        """See ``ServerTransport``."""
        return self._transport.begin_publish(version)

    def end_publish(self) -> None:
        """See ``ServerTransport``; sends the grants that have waited for this version."""
        self._transport.end_publish()
        self._newest += 1
        if self._newest == self._num_updates:
            self._let_through()
        for worker in [w for w, grant in self._kept.items() if grant.version <= self._newest]:
            self._transport.grant(worker, self._kept.pop(worker))

    def gradient(self, worker: int) -> np.ndarray:
        """See ``ServerTransport``."""
        return self._transport.gradient(worker)

    def buffers(self, worker: int) -> np.ndarray:
        """See ``ServerTransport``."""
        return self._transport.buffers(worker)

    def receive(self) -> list[Pushed]:
        """See ``ServerTransport``: the next recorded group when all of it has arrived."""
        for pushed in self._transport.receive():
            self._check(pushed)
            self._arrived[pushed.worker] = pushed
        if self._is_free:
            group: Iterable[int] = sorted(self._arrived)
        elif self._groups and all(worker in self._arrived for worker in self._groups[0]):
            group = self._groups.popleft()
        else:
            return []
        pushes = [self._arrived.pop(worker) for worker in group]
        for pushed in pushes:
            self._pushes_left[pushed.worker] -= 1
        return pushes

    def grant(self, worker: int, grant: Grant) -> None:
        """See ``ServerTransport``; waits for the version that this iteration read when it was recorded."""
        before = self._before.get((worker, grant.iteration))
        if self._is_free or before is None or grant.stop:
            if grant.stop and self._pushes_left[worker] > 0:
                self._let_through()  # this run ends sooner: the rest of the order cannot come
            self._transport.grant(worker, grant)
            return
        grant = replace(grant, version=max(grant.version, before["v"]))
        if grant.version > self._newest:
            self._kept[worker] = grant
        else:
            self._transport.grant(worker, grant)

    def close(self) -> None:
        """See ``ServerTransport``."""
        self._transport.close()

    def _let_through(self) -> None:
        self._is_free = True
        for worker in [*self._kept]:
            grant = self._kept.pop(worker)
            self._transport.grant(worker, replace(grant, version=min(grant.version, self._newest)))

    def _check(self, pushed: Pushed) -> None:
        clock = pushed.clock
        before = self._before.get((pushed.worker, clock.iteration))
        if self._is_free or before is None:
            return
        if clock.samples and clock.version != before["v"]:
            raise TrainingError(
                f"the run cannot be repeated: worker {pushed.worker} read version {clock.version} in iteration "
                f"{clock.iteration} in place of {before['v']}, which had been overwritten; raise transport.slots"
            )
        if clock.samples != before["n"]:
            raise TrainingError(
                f"the run cannot be repeated: worker {pushed.worker} had {clock.samples} samples in iteration "
                f"{clock.iteration} in place of {before['n']}; give the same data, batch_size and epochs"
            )


def make_coordinator(paradigm: Paradigm, num_workers: int) -> Coordinator:
    """A coordinator for ``paradigm``, with the recorded times if that is a recorded run's."""
    if paradigm.recording is not None:
        return ForcedTimes(paradigm.rules, paradigm.recording)
    return Coordinator(paradigm, num_workers)


class ForcedTimes(Coordinator):
    """A coordinator that is told the recorded times, so that it decides as it did.

    Args:
        rules: Of the recorded run.
        recording: With as many workers.
    """

    def __init__(self, rules: Rules, recording: Recording) -> None:
        super().__init__(rules, recording.num_workers)
        self._calls = deque(recording.calls)
        self._latest = 0.0

    def start(self, now: float) -> Outcome:
        """See ``Coordinator``; ``now`` is the recorded one here and below."""
        return super().start(self._next("start"))

    def on_pushes(self, pushes: Iterable[Push], now: float) -> Outcome:
        """See ``Coordinator``."""
        ats = {push.worker: push.at for push in self._calls[0].pushes} if self._calls else {}
        at = self._next("pushes")
        return super().on_pushes([p._replace(at=ats.get(p.worker, at)) for p in pushes], at)

    def on_finish(self, workers: Iterable[int], now: float) -> Outcome:
        """See ``Coordinator``."""
        return super().on_finish(workers, self._next("finish"))

    def on_failure(self, workers: Iterable[int], now: float) -> Outcome:
        """See ``Coordinator``."""
        return super().on_failure(workers, self._next("failure"))

    def _next(self, kind: str) -> float:
        """The time of the next recorded call; where the order is no longer the recorded one, the latest again."""
        if self._calls and self._calls[0].kind == kind:
            self._latest = self._calls.popleft().now
        else:
            self._calls.clear()
        return self._latest
