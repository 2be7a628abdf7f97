"""The recorded order, forced on a transport and a coordinator that see another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hydssp.coordination import ASP, DSSP, Coordinator, ProtocolError, Push
from hydssp.errors import TrainingError, UserError
from hydssp.recorded import check_repeatable
from hydssp.simulation.forced import ForcedOrder, ForcedTimes
from hydssp.simulation.recording import Call, Recording
from hydssp.transport.local import LocalFabric
from hydssp.transport.messages import Clock, Grant

CONFIG = {"batch_size": 8, "data": {"name": "digits", "sharding": "dynamic"}}


def recording(*pushes, groups=None):
    """A run of two workers with these pushes, ``(worker, iteration, version)``, each alone and one update."""
    groups = groups or [[number] for number in range(len(pushes))]
    calls = [Call("start", 1.0)]
    for number, group in enumerate(groups):
        told = [Push(pushes[i][0], 1.5 + number) for i in group]
        calls.append(Call("pushes", 2.0 + number, told))
    records = [{"w": w, "it": it, "v": v, "n": 8} for w, it, v in pushes]
    return Recording(Path("run"), dict(CONFIG), 2, calls, records, [0.1] * len(groups), True)


class World:
    """A transport of two workers behind a forced order."""

    def __init__(self, *pushes, groups=None):
        self.fabric = LocalFabric(2, 1, np.float64, slots=8, clock=lambda: 0.0)
        self.forced = ForcedOrder(self.fabric.server, recording(*pushes, groups=groups))
        self.newest = -1
        self.publish()

    def publish(self):
        self.newest += 1
        self.forced.begin_publish(self.newest)[:] = self.newest
        self.forced.end_publish()

    def grant(self, worker, iteration, **more):
        self.forced.grant(worker, Grant(iteration, self.newest, count=8, **more))

    def push(self, worker, version=None, samples=8):
        grant = self.fabric.workers[worker].poll_grant()
        assert grant is not None
        clock = Clock(grant.iteration, grant.version if version is None else version, samples)
        self.fabric.workers[worker].push(np.zeros(1), clock)

    def received(self):
        return [pushed.worker for pushed in self.forced.receive()]


def test_pushes_come_through_in_the_recorded_order():
    world = World((0, 0, 0), (1, 0, 0), (0, 1, 1))
    world.grant(0, 0)
    world.grant(1, 0)
    world.push(1)
    assert world.received() == []
    world.push(0)
    assert world.received() == [0]
    assert world.received() == [1]
    assert world.received() == []


def test_pushes_that_were_handled_together_are_again():
    world = World((0, 0, 0), (1, 0, 0), groups=[[0, 1]])
    world.grant(0, 0)
    world.grant(1, 0)
    world.push(0)
    assert world.received() == []
    world.push(1)
    assert world.received() == [0, 1]


def test_a_grant_waits_for_the_version_that_was_read():
    world = World((0, 0, 1), (1, 0, 0))
    world.grant(0, 0)
    assert world.fabric.workers[0].poll_grant() is None
    world.publish()
    assert world.fabric.workers[0].poll_grant().version == 1


def test_another_version_or_another_batch_ends_the_run():
    for wrong, words in (({"version": 1}, "read version 1"), ({"samples": 5}, "5 samples")):
        world = World((0, 0, 0), (1, 0, 0))
        world.publish()
        world.grant(0, 0)
        world.push(0, **{"version": 0, **wrong})
        with pytest.raises(TrainingError, match=words):
            world.received()


def test_a_run_that_ends_sooner_does_not_wait_for_the_rest():
    world = World((0, 0, 0), (0, 1, 0), (1, 0, 0))
    world.grant(0, 0)
    world.grant(1, 0)
    world.push(0)
    assert world.received() == [0]
    world.push(1)
    assert world.received() == []
    world.grant(0, 1, stop=True)
    assert world.received() == [1]


def test_what_comes_after_the_recorded_updates_comes_as_it_comes():
    world = World((0, 0, 0))
    world.grant(0, 0)
    world.push(0)
    assert world.received() == [0]
    world.publish()
    world.grant(0, 1)
    world.push(0)
    assert world.received() == [0]


def test_the_coordinator_is_told_the_recorded_times():
    forced = ForcedTimes(DSSP(0, 2).rules, recording((0, 0, 0), (1, 0, 0), (0, 1, 1)))
    plain = Coordinator(DSSP(0, 2), 2)
    plain.start(1.0)
    forced.start(77.0)
    for number, worker in enumerate((0, 1, 0)):
        outcome = forced.on_pushes([Push(worker, 200.0)], 300.0 + number)
        assert outcome == plain.on_pushes([Push(worker, 1.5 + number)], 2.0 + number)
    with pytest.raises(ProtocolError):
        forced.on_pushes([Push(0, 1.0)] * 2, 0.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_workers": 3}, "had 2 workers, this one has 3"),
        ({"batch_size": 16}, "batch_size=16"),
        ({"data": {"name": "digits", "sharding": "static"}}, "data="),
    ],
)
def test_a_run_that_the_order_does_not_fit_is_refused(change, words):
    config = {**CONFIG, "num_workers": 2}
    check_repeatable(recording((0, 0, 0)), config)
    with pytest.raises(UserError, match=words):
        check_repeatable(recording((0, 0, 0)), {**config, **change})


def test_other_paradigms_force_nothing():
    assert ASP().recording is None
