"""Push, finish and fail in any legal order, with illegal events in between."""

from __future__ import annotations

import copy

import pytest
from coordination_worlds import ALL_SWITCHES, PRESETS, Reference, in_short
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hydssp.coordination import Coordinator, ProtocolError, Push, Rules

steps = st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0, 2.0, 10.0])


class CoordinatorMachine(RuleBasedStateMachine):
    @initialize(
        switches=st.sampled_from(ALL_SWITCHES),
        preset=st.sampled_from([None, None, None, *PRESETS]),
        s_lower=st.integers(0, 2),
        r_max=st.integers(0, 3),
        num_workers=st.integers(1, 5),
    )
    def start(self, switches, preset, s_lower, r_max, num_workers):
        self.rules = preset.rules if preset else Rules(s_lower, s_lower + r_max, **switches)
        self.num_workers = num_workers
        self.coordinator = Coordinator(self.rules, num_workers)
        self.reference = Reference(self.rules, num_workers)
        self.now = 0.0
        assert in_short(self.coordinator.start(0.0)) == in_short(self.reference.start(0.0))

    def same(self, kind, what):
        outcome = getattr(self.coordinator, kind)(what, self.now)
        assert in_short(outcome) == in_short(getattr(self.reference, kind)(what, self.now))
        assert all(decision.reason for decision in outcome.releases + outcome.holds)

    @precondition(lambda self: self.coordinator.computing)
    @rule(data=st.data(), step=steps)
    def push(self, data, step):
        self.now += step
        workers = data.draw(st.permutations(self.coordinator.computing))
        workers = workers[: data.draw(st.integers(1, len(workers)))]
        pushes = [
            Push(
                worker,
                self.now - data.draw(st.sampled_from([0.0, 0.0, 0.25, 100.0, -1.0])),
                is_last=data.draw(st.integers(0, 19)) == 19,
                has_gradient=data.draw(st.integers(0, 4)) < 4,
            )
            for worker in workers
        ]
        self.same("on_pushes", pushes)

    @precondition(lambda self: self.coordinator.computing)
    @rule(data=st.data(), repeats=st.integers(2, 8), step=steps)
    def one_worker_runs_on(self, data, repeats, step):
        worker = data.draw(st.sampled_from(self.coordinator.computing))
        for _ in range(repeats):
            if worker in self.coordinator.computing:
                self.now += step
                self.same("on_pushes", [Push(worker, self.now)])

    @precondition(lambda self: self.coordinator.num_active > 1)
    @rule(data=st.data(), step=steps, kind=st.sampled_from(["on_finish", "on_failure"]))
    def leave(self, data, step, kind):
        self.now += step
        self.same(kind, [data.draw(st.sampled_from(range(self.num_workers)))])

    @precondition(lambda self: self.coordinator.num_active < self.num_workers)
    @rule(data=st.data())
    def push_of_an_inactive_worker(self, data):
        gone = sorted(set(range(self.num_workers)) - set(self.coordinator.active))
        before = self.coordinator.num_ignored_pushes
        self.same("on_pushes", [Push(data.draw(st.sampled_from(gone)), self.now)])
        assert self.coordinator.num_ignored_pushes == before + 1

    @rule(data=st.data())
    def illegal(self, data):
        before = copy.deepcopy(vars(self.coordinator))
        someone = list(self.coordinator.computing[:1])
        wrong = [[Push(self.num_workers, self.now)], [Push(-1, self.now)]]
        wrong += [[Push(worker, self.now)] for worker in self.coordinator.held]
        wrong += [[Push(worker, self.now)] * 2 for worker in someone]
        pushes = data.draw(st.sampled_from(wrong))
        if pushes[0].worker not in someone:
            pushes = pushes + [Push(worker, self.now) for worker in someone]
        with pytest.raises(ProtocolError):
            self.coordinator.on_pushes(pushes, self.now)
        with pytest.raises(ProtocolError):
            self.coordinator.on_failure([0, self.num_workers], self.now)
        with pytest.raises(ValueError, match="not before the last event"):
            self.coordinator.on_pushes([Push(worker, self.now) for worker in someone], self.now - 0.001)
        with pytest.raises(ValueError, match="not before the last event"):
            self.coordinator.on_finish([0], self.now - 0.001)
        with pytest.raises(ProtocolError):
            self.coordinator.start(self.now)
        assert vars(self.coordinator) == before

    @invariant()
    def state_is_sound(self):
        if hasattr(self, "coordinator"):
            self.coordinator.validate()


TestCoordinator = CoordinatorMachine.TestCase
TestCoordinator.settings = settings(max_examples=120, stateful_step_count=30)
