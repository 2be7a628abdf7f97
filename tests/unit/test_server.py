"""The server's limits and messages, driven through the local transport with a clock that the test moves."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from hydssp import server as server_role
from hydssp.coordination import ASP, BSP, DSSP, Coordinator, RangeDealer
from hydssp.errors import TrainingError
from hydssp.evaluator import Evaluation, Pinned
from hydssp.observe.recorder import Recorder
from hydssp.transport.local import LocalFabric
from hydssp.transport.messages import Clock
from hydssp.update.buffers import BufferPolicy, WorkersBuffers
from hydssp.update.gap_aware import GapAware
from hydssp.update.schedule import Constant, LrClock
from hydssp.update.step import ChunkedOptimizer

NUMEL = 10
NO_LIMITS = server_role.Limits()


class FakeEvaluator:
    """Gives the results that a test has put into it; checks that it is used as an evaluator may be."""

    def __init__(self, num_buffers):
        self.pinned = Pinned(np.zeros(NUMEL, np.float32), np.zeros(num_buffers))
        self.buffers = self.pinned.buffers
        self.requests, self.results = [], []
        self.is_ready = True
        self.is_filled = self.has_ended = False

    @property
    def is_busy(self):
        return len(self.requests) > len(self.results)

    @property
    def num_pending(self):
        return len(self.requests) - len(self.results)

    def submit(self, request):
        assert not self.is_busy
        self.requests.append(request)
        self.is_filled = False
        return self.pinned

    def begin(self):
        self.is_filled = True

    def answer(self, accuracy):
        self.results.append(Evaluation(self.requests[-1], accuracy, 0.5))
        self.waiting = self.results[-1]

    def poll(self):
        result, self.waiting = getattr(self, "waiting", None), None
        if self.has_ended and self.is_busy:
            self.answer(0.9)
            result, self.waiting = self.waiting, None
        return result

    def training_ended(self):
        self.has_ended = True


class World:
    """A server and the workers' ends; a test pushes by hand."""

    def __init__(
        self, paradigm, num_workers=2, *, limits=NO_LIMITS, buffers=0, every=float("inf"), mitigation=None
    ):
        self.time = 0.0
        fabric = LocalFabric(num_workers, NUMEL, np.float32, num_buffers=buffers, clock=lambda: self.time)
        self.ends = fabric.workers
        self.weights = torch.zeros(NUMEL)
        self.stop_code = 0
        self.evaluator = FakeEvaluator(buffers)
        self.recorder = Recorder(None, paradigm="test", data_size=100)
        self.server = server_role.Server(
            transport=fabric.server,
            coordinator=Coordinator(paradigm, num_workers),
            dealer=RangeDealer(100, 10, None, rounds=paradigm.is_synchronous),
            optimizer=ChunkedOptimizer(
                self.weights, lambda g: torch.optim.SGD(g, lr=1.0), [(0, NUMEL, {})], 3, mitigation=mitigation
            ),
            step_rule=server_role.StepRule(
                Constant(),
                LrClock.samples,
                1.0,
                is_mean=paradigm.is_synchronous,
                batch_size=10,
                num_samples=100,
            ),
            evaluator=self.evaluator,
            evaluate_every=every,
            recorder=self.recorder,
            limits=limits,
            buffers=WorkersBuffers(
                np.zeros(buffers), num_workers, BufferPolicy.average, np.zeros(buffers, bool)
            ),
            stop_code=lambda: self.stop_code,
            describe="worker {} (rank here)".format,
        )
        self.recorder.started(0.0, num_workers)
        self.server.start()

    def push(self, worker, value=1.0, buffers=None, **clock):
        """The worker has taken its grant, computed, and pushes a gradient of ``value`` everywhere."""
        end = self.ends[worker]
        grant = end.poll_grant()
        assert grant is not None, "held"
        assert not grant.stop, "stopped"
        self.time += 1.0
        message = Clock(grant.iteration, grant.version, samples=grant.count, **{"loss": 1.0, **clock})
        end.push(np.full(NUMEL, value, np.float32), message, buffers)
        self.server.step()


def test_sum_of_pushes_and_mean_of_rounds():
    asp, bsp = World(ASP()), World(BSP())
    for world in (asp, bsp):
        world.push(0, 1.0)
        world.push(1, 3.0)
    assert (asp.weights == -4).all()
    assert (bsp.weights == -2).all()
    assert (asp.server.version, bsp.server.version) == (2, 1)


def test_the_updater_learns_of_each_grant_and_the_recorder_of_each_effect():
    world = World(ASP(), mitigation=GapAware())
    world.push(0, 1.0)
    world.push(1, 1.0)  # computed from the weights before worker 0's
    world.push(1, 1.0)
    summary = world.recorder.summary(world.time, "done", "")
    assert summary["gap"]["histogram"] == {"0": 2, "1": 1}  # lr 1: the weights had moved by 1
    assert summary["gap"]["approximated"] == 0
    assert (world.weights == -(1 + 0.5 + 1)).all()  # n = 1, C = 1: G = 2


def test_a_worker_that_does_not_push_is_named_with_what_it_last_did():
    world = World(ASP(), limits=server_role.Limits(stall_s=50.0))
    world.push(1)
    world.push(1, compute_s=0.25)
    world.time = 49.0
    world.server.step()
    world.time = 51.5
    with pytest.raises(TrainingError) as error:
        world.server.step()
    told = str(error.value)
    assert "stall_limit_s=50" in told
    assert "worker 0 (rank here): granted iteration 0 at 0.0 s, 52 s ago; it has never pushed" in told
    assert "worker 1" not in told
    world.time = 60.0
    with pytest.raises(TrainingError, match=r"worker 1.*pushed iteration 1 \(computed 0.25 s\) at 2.0 s"):
        world.server.step()


def test_a_held_worker_is_not_missing():
    world = World(DSSP(0, 0), limits=server_role.Limits(stall_s=50.0))
    world.push(1)
    world.time = 60.0
    with pytest.raises(TrainingError) as error:
        world.server.step()
    assert "worker 0" in str(error.value)
    assert "worker 1" not in str(error.value)


def test_gradients_that_are_not_finite_are_refused_and_the_sender_named(caplog):
    world = World(ASP(), limits=server_role.Limits(rejected_in_a_row=3))
    with caplog.at_level(logging.WARNING):
        world.push(0, np.nan, is_finite=False, loss=float("nan"))
    assert "worker 0 (rank here)" in caplog.text
    assert (world.weights == 0).all()
    assert world.server.version == 0
    world.push(1, 2.0)  # a good one in between
    world.push(0, np.nan, is_finite=False)
    world.push(0, np.nan, is_finite=False)
    with pytest.raises(TrainingError, match=r"3 gradients in a row.*worker 1.*nonfinite_limit"):
        world.push(1, np.nan, is_finite=False)


def test_a_finite_loss_behind_a_gradient_that_is_not_points_to_short_formats():
    world = World(ASP(), limits=server_role.Limits(rejected_in_a_row=1))
    with pytest.raises(
        TrainingError, match=r"nonfinite_limit above 1\); its loss was finite: .*wire.push.*bf16"
    ):
        world.push(0, np.nan, is_finite=False, loss=2.3e7)


@pytest.mark.parametrize(
    ("good", "refused", "skipped", "has_learned"),
    [(2, 2, 1, True), (0, 0, 0, True), (1, 2, 0, False), (0, 1, 0, False), (0, 0, 2, False)],
)
def test_a_run_most_of_whose_gradients_were_refused_has_not_learned(good, refused, skipped, has_learned):
    world = World(ASP())
    for _ in range(good):
        world.push(0)
    for _ in range(refused):
        world.push(0, np.nan, is_finite=False)
    for _ in range(skipped):
        world.push(0, np.nan, is_finite=False, is_skipped=True)
    if has_learned:
        world.server.check_learned()
        return
    words = f"{refused} gradients were not finite and {skipped} were skipped .* {good} made {good} updates"
    with pytest.raises(TrainingError, match=words):
        world.server.check_learned()


def test_weights_that_are_not_finite_are_not_evaluated():
    world = World(ASP(), every=10)
    with pytest.raises(TrainingError, match="not finite any more at version 1"):
        world.push(0, np.inf)  # a lie: it says finite


def test_evaluation_gets_weights_and_buffers_that_belong_together():
    world = World(ASP(), every=20, buffers=2)
    world.push(0, 1.0, np.array([2.0, 4.0]))
    assert not world.evaluator.requests
    world.push(1, 1.0, np.array([4.0, 8.0]))
    (request,) = world.evaluator.requests
    assert (request.version, request.samples, world.evaluator.is_filled) == (2, 20, True)
    assert (world.evaluator.pinned.weights == -2).all()
    assert world.evaluator.pinned.buffers.tolist() == [3.0, 6.0]
    world.push(0, 1.0, np.array([0.0, 0.0]))
    world.push(0, 1.0, np.array([0.0, 0.0]))
    assert len(world.evaluator.requests) == 1  # busy: this one is left out
    world.evaluator.answer(0.5)
    world.push(0, 1.0, np.array([0.0, 0.0]))
    assert len(world.evaluator.requests) == 2


def test_target_accuracy_ends_the_run_and_drains_what_is_under_way():
    world = World(ASP(), limits=server_role.Limits(target_accuracy=0.8), every=10)
    world.push(0)
    world.evaluator.answer(0.85)
    world.push(0)
    assert world.server.ended_by == "target_accuracy"
    assert world.ends[0].poll_grant().stop
    before = world.weights.clone()
    world.push(1)
    assert (world.weights == before).all()
    assert world.ends[1].poll_grant().stop
    assert world.server.is_done


@pytest.mark.parametrize("by_worker", [False, True])
def test_a_signal_ends_the_run_in_order(by_worker):
    world = World(ASP())
    world.push(0)
    if by_worker:
        world.push(0, stop_code=75)
    else:
        world.stop_code = 75
        world.push(0)
    assert world.server.exit_code == 75
    assert "signal" in world.server.ended_by
    world.push(1)
    assert world.server.is_done
    world.server.evaluate_final()
    assert len(world.evaluator.requests) == 1
