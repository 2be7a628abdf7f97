from __future__ import annotations

import copy

import pytest
from coordination_worlds import ALL_SWITCHES, PRESETS, run, simple_world

from hydssp.coordination import (
    ASP,
    BSP,
    DSSP,
    SSP,
    Cause,
    Coordinator,
    Decision,
    Outcome,
    ProtocolError,
    Push,
    Rules,
)
from hydssp.errors import UserError


@pytest.fixture
def begin():
    """Makes started coordinators; their invariants are checked at teardown."""
    made = []

    def begin(paradigm, num_workers):
        coordinator = Coordinator(paradigm, num_workers)
        coordinator.start(0.0)
        made.append(coordinator)
        return coordinator

    yield begin
    for coordinator in made:
        coordinator.validate()


def push(coordinator, *workers, now, **flags):
    """All of ``workers`` push at ``now``."""
    outcome = coordinator.on_pushes([Push(worker, now, **flags) for worker in workers], now)
    coordinator.validate()
    return outcome


def released(outcome):
    return [decision.worker for decision in outcome.releases]


def held(outcome):
    return [(decision.worker, decision.cause) for decision in outcome.holds]


class TestStart:
    @pytest.mark.parametrize("paradigm", PRESETS, ids=str)
    def test_everybody_is_granted_once(self, paradigm):
        coordinator = Coordinator(paradigm, 3)
        outcome = coordinator.start(0.5)
        assert released(outcome) == [0, 1, 2]
        assert {decision.cause for decision in outcome.releases} == {Cause.START}
        assert (outcome.apply, outcome.holds, outcome.ignored) == ((), (), ())
        assert coordinator.computing == (0, 1, 2)
        assert coordinator.active == (0, 1, 2)
        assert coordinator.held == ()

    def test_rules_or_paradigm(self):
        assert Coordinator(SSP(2), 3).rules == Coordinator(SSP(2).rules, 3).rules

    def test_a_push_before_the_start_has_no_grant(self):
        with pytest.raises(ProtocolError, match="worker 0 pushed without a grant"):
            Coordinator(ASP(), 2).on_pushes([Push(0, 0.0)], 0.0)

    def test_who_is_lost_before_the_start_is_not_granted(self):
        coordinator = Coordinator(ASP(), 2)
        assert coordinator.on_failure([1], 0.0) == Outcome()
        assert released(coordinator.start(0.0)) == [0]
        coordinator.validate()

    def test_there_must_be_a_worker(self):
        with pytest.raises(UserError, match="num_workers=0: must be an integer >= 1"):
            Coordinator(ASP(), 0)


class TestIllegalEvents:
    @pytest.mark.parametrize(
        ("event", "error", "message"),
        [
            (
                lambda c: c.on_pushes([Push(1, 3.0), Push(0, 3.0)], 3.0),
                ProtocolError,
                "worker 0 pushed without",
            ),
            (
                lambda c: c.on_pushes([Push(1, 3.0), Push(1, 3.0)], 3.0),
                ProtocolError,
                "worker 1 pushed twice",
            ),
            (
                lambda c: c.on_pushes([Push(1, 3.0), Push(2, 3.0)], 3.0),
                ProtocolError,
                "worker 2 does not exist",
            ),
            (lambda c: c.on_pushes([Push(1, 3.0), Push(-1, 3.0)], 3.0), ProtocolError, "worker -1 does not"),
            (lambda c: c.on_finish([1, 2], 3.0), ProtocolError, "worker 2 does not exist"),
            (lambda c: c.on_failure([-1], 3.0), ProtocolError, "worker -1 does not exist"),
            (lambda c: c.start(3.0), ProtocolError, "has started already"),
            (lambda c: c.on_pushes([Push(1, 0.5)], 0.5), ValueError, "not before the last event"),
            (lambda c: c.on_pushes([Push(1, 3.0)], float("nan")), ValueError, "must be finite"),
            (lambda c: c.on_pushes([Push(1, 3.0)], float("inf")), ValueError, "must be finite"),
            (lambda c: c.on_finish([1], 0.5), ValueError, "not before the last event"),
            (lambda c: c.on_failure([1], 0.5), ValueError, "not before the last event"),
        ],
    )
    def test_raises_and_leaves_the_state_as_it_was(self, begin, event, error, message):
        coordinator = begin(SSP(0), 2)
        push(coordinator, 0, now=1.0)
        before = copy.deepcopy(vars(coordinator))
        with pytest.raises(error, match=message):
            event(coordinator)
        assert vars(coordinator) == before

    def test_a_push_of_an_inactive_worker_is_ignored_and_counted(self, begin):
        coordinator = begin(ASP(), 3)
        coordinator.on_failure([1], 1.0)
        outcome = push(coordinator, 1, 2, now=2.0)
        assert outcome.ignored == (1,)
        assert outcome.apply == (2,)
        assert released(outcome) == [2]
        assert coordinator.num_ignored_pushes == 1
        assert coordinator.clocks == (0, 0, 1)
        assert push(coordinator, 1, now=2.5) == Outcome(ignored=(1,))

    def test_leaving_twice_changes_nothing(self, begin):
        coordinator = begin(ASP(), 2)
        coordinator.on_finish([1], 1.0)
        assert coordinator.on_failure([1], 1.0) == Outcome()
        assert (coordinator.num_finished, coordinator.num_failed, coordinator.num_active) == (1, 0, 1)


class TestSSP:
    def test_waits_until_the_lead_is_within_s(self, begin):
        coordinator = begin(SSP(1), 3)
        assert released(push(coordinator, 0, now=1.0)) == [0]
        outcome = push(coordinator, 0, now=2.0)
        assert held(outcome) == [(0, Cause.HELD_BY_RULE)]
        assert coordinator.held == (0,)
        assert coordinator.lead(0) == 2
        assert released(push(coordinator, 1, now=3.0)) == [1]  # worker 2 is still at clock 0
        outcome = push(coordinator, 2, now=4.0)
        assert released(outcome) == [0, 2]
        assert outcome.releases[0] == Decision(0, Cause.LEAD, 4.0, 2, 1, 0, 2.0, 0, (("s_lower", 1),))
        assert outcome.releases[0].wait_s == 2.0
        assert outcome.releases[1].wait_s == 0.0

    def test_never_asks_the_controller(self, begin):
        coordinator = begin(SSP(1), 2)
        for now in (1.0, 2.0):
            push(coordinator, 0, now=now)
        assert coordinator.held == (0,)
        assert coordinator.num_controller_calls == 0

    def test_pushes_that_came_together_are_counted_before_anyone_is_decided_on(self, begin):
        coordinator = begin(SSP(0), 3)
        outcome = push(coordinator, 2, 0, 1, now=1.0)
        assert released(outcome) == [0, 1, 2]
        assert outcome.apply == (0, 1, 2)
        assert outcome.holds == ()

    def test_largest_lead_after_a_push_and_at_a_start(self, begin):
        coordinator = begin(SSP(2), 2)
        for now in (1.0, 2.0, 3.0):
            push(coordinator, 0, now=now)
        assert coordinator.held == (0,)
        assert (coordinator.lead_max, coordinator.lead_max_at_start) == (3, 2)


class TestRounds:
    def test_one_update_when_everybody_has_pushed(self, begin):
        coordinator = begin(BSP(), 3)
        assert push(coordinator, 2, now=1.0).apply == ()
        assert push(coordinator, 0, now=2.0).apply == ()
        outcome = push(coordinator, 1, now=3.0)
        assert outcome.apply == (0, 1, 2)
        assert released(outcome) == [0, 1, 2]

    def test_an_empty_push_completes_the_round_without_a_gradient(self, begin):
        coordinator = begin(BSP(), 2)
        push(coordinator, 0, now=1.0)
        outcome = push(coordinator, 1, now=2.0, has_gradient=False)
        assert outcome.apply == (0,)
        assert released(outcome) == [0, 1]
        push(coordinator, 0, now=3.0, has_gradient=False)
        outcome = push(coordinator, 1, now=4.0, has_gradient=False)
        assert outcome.apply == ()
        assert released(outcome) == [0, 1]

    @pytest.mark.parametrize("kind", ["on_finish", "on_failure"])
    def test_completed_by_one_that_leaves(self, begin, kind):
        coordinator = begin(BSP(), 3)
        push(coordinator, 0, 1, now=1.0)
        outcome = getattr(coordinator, kind)([2], 2.0)
        assert outcome.apply == (0, 1)
        assert released(outcome) == [0, 1]

    def test_the_gradient_of_a_failed_worker_is_dropped(self, begin):
        coordinator = begin(BSP(), 3)
        push(coordinator, 0, 1, now=1.0)
        assert coordinator.on_failure([0], 2.0) == Outcome()
        assert push(coordinator, 2, now=3.0).apply == (1, 2)

    def test_the_gradient_of_a_finished_worker_stays(self, begin):
        coordinator = begin(BSP(), 3)
        push(coordinator, 0, now=1.0, is_last=True)
        push(coordinator, 1, now=1.0)
        assert coordinator.on_finish([1], 2.0) == Outcome()
        assert push(coordinator, 2, now=3.0).apply == (0, 1, 2)

    def test_the_last_round_waits_for_every_last_push(self, begin):
        coordinator = begin(BSP(), 2)
        # The only active worker is now at min(t) = max(t), but has not pushed in this round.
        assert push(coordinator, 0, now=1.0, is_last=True) == Outcome()
        outcome = push(coordinator, 1, now=2.0, is_last=True)
        assert outcome.apply == (0, 1)
        assert outcome.releases == ()
        assert coordinator.num_active == 0

    def test_what_is_pending_is_applied_when_the_last_active_worker_fails(self, begin):
        coordinator = begin(BSP(), 2)
        push(coordinator, 0, now=1.0, is_last=True)
        assert coordinator.on_failure([1], 2.0).apply == (0,)


class TestPermit:
    def dssp(self, **switches):
        return Rules(**{"s_lower": 0, "s_upper": 4, "cap": "none", **switches})

    def test_released_by_the_next_push_of_a_slowest_worker(self, begin):
        coordinator = begin(self.dssp(), 3)
        assert held(push(coordinator, 0, now=1.0)) == [(0, Cause.HELD_BY_RULE)]
        outcome = push(coordinator, 1, now=2.0)  # worker 2 stays at clock 0: the lead of 0 is still 1
        assert [(d.worker, d.cause, d.lead) for d in outcome.releases] == [(0, Cause.AWAITED_PUSH, 1)]
        assert held(outcome) == [(1, Cause.HELD_BY_RULE)]

    def test_with_gap_it_waits_for_the_lead(self, begin):
        coordinator = begin(self.dssp(release="gap"), 3)
        push(coordinator, 0, now=1.0)
        assert released(push(coordinator, 1, now=2.0)) == []
        assert released(push(coordinator, 2, now=3.0)) == [0, 1, 2]

    def test_a_push_of_a_worker_that_is_not_slowest_is_not_awaited(self, begin):
        coordinator = begin(self.dssp(s_lower=1), 3)
        push(coordinator, 0, 1, now=1.0)
        assert held(push(coordinator, 0, now=2.0)) == [(0, Cause.HELD_BY_RULE)]
        assert released(push(coordinator, 1, now=3.0)) == []
        assert released(push(coordinator, 2, now=4.0)) == [0, 1, 2]

    def test_a_push_that_came_with_ones_own_is_not_awaited(self, begin):
        coordinator = begin(self.dssp(), 3)
        outcome = push(coordinator, 0, 1, now=1.0)
        assert released(outcome) == []
        assert len(outcome.holds) == 2

    def test_a_last_push_is_awaited_too(self, begin):
        coordinator = begin(self.dssp(), 3)
        push(coordinator, 0, now=1.0)
        outcome = push(coordinator, 1, now=2.0, is_last=True)
        assert [(d.worker, d.cause) for d in outcome.releases] == [(0, Cause.AWAITED_PUSH)]

    @pytest.mark.parametrize("flags", [{}, {"has_gradient": False}])
    def test_an_empty_push_releases_like_any_other(self, begin, flags):
        coordinator = begin(self.dssp(), 2)
        push(coordinator, 0, now=1.0)
        assert released(push(coordinator, 1, now=2.0, **flags)) == [0, 1]

    def test_no_extension_while_a_slowest_has_not_pushed(self, begin):
        coordinator = begin(self.dssp(s_upper=12), 2)
        push(coordinator, 0, now=1.0)
        assert coordinator.held == (0,)
        assert coordinator.extension_histogram == {0: 1}

    def extended(self, begin, **switches):
        """Worker 0 takes 1 s, worker 1 takes 3 s and is due at 6; at 4 worker 0 asks and gets r* = 2."""
        coordinator = begin(self.dssp(release="gap", **switches), 2)
        push(coordinator, 0, now=1.0)
        assert released(push(coordinator, 1, now=3.0)) == [0, 1]
        return coordinator

    @pytest.mark.parametrize(("grant", "left"), [("exact", [1, 0]), ("literal", [2, 1, 0])])
    def test_exact_grants_r_iterations_and_literal_one_more(self, begin, grant, left):
        coordinator = self.extended(begin, grant=grant)
        for iteration, expected in enumerate(left):
            (decision,) = push(coordinator, 0, now=4.0 + iteration).releases
            assert (decision.cause, decision.extension) == (Cause.EXTENSION, expected)
        assert coordinator.extension_histogram == {0: 1, 2: 1}
        # The extension is used up: the controller is asked again, and worker 1 is due now or late.
        assert held(push(coordinator, 0, now=4.0 + len(left))) == [(0, Cause.HELD_BY_RULE)]
        assert coordinator.extension_histogram == {0: 2, 2: 1}

    def test_a_left_over_extension_is_cleared_when_the_lead_is_small_again(self, begin):
        coordinator = self.extended(begin)
        assert push(coordinator, 0, now=4.0).releases[0].extension == 1
        push(coordinator, 1, now=4.1)
        push(coordinator, 1, now=4.2)
        (decision,) = push(coordinator, 0, now=4.5).releases
        assert (decision.cause, decision.lead, decision.extension) == (Cause.LEAD, 0, 0)

    def test_only_the_fastest_may_ask(self, begin):
        for ask, num_calls in (("fastest", 2), ("any", 3)):
            coordinator = begin(self.dssp(ask=ask, release="gap"), 3)
            push(coordinator, 0, 1, 2, now=1.0)
            assert released(push(coordinator, 0, now=1.5)) == [0]  # one more fits before the others' pushes
            assert released(push(coordinator, 0, now=2.0)) == []
            assert released(push(coordinator, 1, now=2.0)) == []  # at clock 2, and the fastest is at 3
            assert coordinator.num_controller_calls == num_calls

    def test_everyone_at_the_largest_clock_is_the_fastest(self, begin):
        coordinator = begin(self.dssp(ask="fastest", release="gap"), 3)
        push(coordinator, 0, 1, 2, now=1.0)
        push(coordinator, 0, 1, now=1.5)
        assert coordinator.num_controller_calls == 2

    def test_an_interval_of_zero_gives_no_extension_and_is_counted(self, begin):
        coordinator = begin(self.dssp(), 2)
        push(coordinator, 0, 1, now=1.0)
        outcome = push(coordinator, 0, now=1.0)
        assert held(outcome) == [(0, Cause.HELD_BY_RULE)]
        assert coordinator.num_nonpositive_intervals == 1

    @pytest.mark.parametrize(("late", "histogram"), [("clamp", {0: 1}), ("none", {3: 1})])
    def test_a_late_slowest_is_waited_for_only_with_clamp(self, begin, late, histogram):
        coordinator = begin(Rules(1, 5, cap="none", late=late), 2)
        push(coordinator, 0, 1, now=1.0)
        push(coordinator, 0, now=1.8)
        # Worker 1 was due at 2. As printed its next pushes would come at 3, 4 and 5, and 2.6 + 3 * 0.8 is 5.
        push(coordinator, 0, now=2.6)
        assert coordinator.extension_histogram == histogram


class TestPrediction:
    def test_the_slowest_is_the_one_expected_last(self, begin):
        coordinator = begin(DSSP.bounded(0, 9), 3)
        coordinator.on_pushes([Push(0, 1.0), Push(1, 2.0), Push(2, 9.0)], 9.0)
        outcome = push(coordinator, 0, now=10.0)
        # Intervals 1, 2 and 9: worker 1 is expected at 11, worker 2 at 18, i.e. after 8 more of worker 0's.
        assert coordinator.extension_histogram == {8: 1}
        assert outcome.releases[0].extension == 7

    @pytest.mark.parametrize(("interval", "r"), [("processing", 7), ("push_to_push", 1)])
    def test_the_wait_for_a_grant_counts_only_from_push_to_push(self, begin, interval, r):
        coordinator = begin(Rules(0, 9, release="gap", cap="none", interval=interval), 2)
        push(coordinator, 0, now=1.0)
        assert released(push(coordinator, 1, now=8.0)) == [0, 1]
        push(coordinator, 0, now=9.0)
        # Worker 1 is due at 16. Worker 0 took 1 s, or 8 s with its wait: 9 + 7*1 is 16, 9 + 1*8 is 17.
        assert coordinator.extension_histogram == {0: 1, r: 1}

    def test_push_times_are_moved_between_grant_and_now(self, begin):
        for at, interval in ((-5.0, 0.0), (1.5, 1.5), (99.0, 2.0), (float("nan"), 2.0)):
            coordinator = begin(DSSP.bounded(0, 9), 2)
            coordinator.on_pushes([Push(0, 2.0), Push(1, at)], 2.0)
            outcome = push(coordinator, 0, now=2.0)
            assert dict(outcome.holds[0].details)["expected_at"] == 2.0 + interval


class TestCap:
    def test_run_ahead_caps_also_a_worker_with_a_small_lead(self, begin):
        """P=2, s 1..1, A = 1, 100, B = 1.5, .5, .5: B pushes twice while A computes, bound 2."""
        coordinator = begin(DSSP(1, 1), 2)
        push(coordinator, 0, now=1.0)
        assert released(push(coordinator, 1, now=1.5)) == [1]
        outcome = push(coordinator, 1, now=2.0)
        assert held(outcome) == [(1, Cause.HELD_BY_CAP)]
        assert (outcome.holds[0].lead, outcome.holds[0].run_ahead) == (1, 2)
        assert released(push(coordinator, 0, now=101.0)) == [0, 1]
        assert coordinator.run_ahead_max == 2

    def test_the_same_as_a_world(self):
        trace = run(simple_world((1.0, 100.0), (1.5, 0.5, 0.5, 0.5), quota=4), DSSP(1, 1).rules)
        assert trace.one_other_max == 2

    def test_held_workers_cap_nobody(self, begin):
        coordinator = begin(DSSP(0, 0), 3)
        push(coordinator, 0, now=1.0)
        push(coordinator, 1, now=2.0)
        assert coordinator.held == (0, 1)
        assert released(push(coordinator, 2, now=3.0)) == [0, 1, 2]
        assert coordinator.run_ahead(0) == 0

    def test_a_cap_held_slowest_is_freed_by_a_push_that_nobody_awaited(self):
        """If only an awaited push freed cap-held workers, both would wait for ever from t=14 on."""
        at_13_and_14 = []

        def check(coordinator, event, outcome):
            if event[2] in (13.0, 14.0):
                at_13_and_14.append((held(outcome), released(outcome), coordinator.held))

        world = simple_world(
            (2.0, 3.0, 2.0, 2.0, 1.0, 3.0, 2.0), (5.0, 1.0, 2.0, 1.0, 1.0, 1.0, 3.0), quota=14
        )
        trace = run(world, DSSP(0, 1).rules, check)
        assert at_13_and_14 == [
            ([(0, Cause.HELD_BY_CAP)], [], (0,)),
            ([(1, Cause.HELD_BY_RULE)], [0], (1,)),
        ]
        assert trace.num_grants == [14, 14]

    @pytest.mark.parametrize("s_lower", [0, 1])
    def test_two_unsteady_workers_never_block_each_other(self, s_lower):
        world = simple_world((8.0, 1.0, 1.0, 3.0, 1.0, 2.0, 5.0), (1.0, 8.0, 5.0, 3.0, 1.0, 8.0), quota=40)
        for switches in ALL_SWITCHES:
            assert run(world, Rules(s_lower, 1, **switches)).num_grants == [40, 40]

    def test_the_lead_cap_holds_whoever_is_extended_too_far(self, begin):
        coordinator = begin(Rules(0, 2, grant="literal", cap="lead", release="gap"), 2)
        push(coordinator, 0, now=1.0)
        push(coordinator, 1, now=10.0)
        assert released(push(coordinator, 0, now=11.0)) == [0]  # r* = 2, granted 3 times
        assert released(push(coordinator, 0, now=12.0)) == [0]
        outcome = push(coordinator, 0, now=13.0)
        assert held(outcome) == [(0, Cause.HELD_BY_CAP)]
        assert outcome.holds[0].extension == 1  # kept while it is held
        outcome = push(coordinator, 1, now=20.0)
        assert [(d.worker, d.cause, d.lead, d.extension) for d in outcome.releases] == [
            (0, Cause.EXTENSION, 2, 0),
            (1, Cause.LEAD, 0, 0),
        ]


class TestLeaving:
    def test_a_failure_releases_who_waited_for_it(self, begin):
        for paradigm in (SSP(0), DSSP(0, 0), DSSP.bounded(0, 0), DSSP.paper(0, 0), BSP()):
            coordinator = begin(paradigm, 2)
            assert released(push(coordinator, 0, now=1.0)) == []
            assert released(coordinator.on_failure([1], 2.0)) == [0]
            assert coordinator.num_failed == 1
            assert coordinator.clocks == (1, 0)
            assert coordinator.min_clock == coordinator.max_clock == 1

    def test_a_finish_of_a_held_worker(self, begin):
        coordinator = begin(SSP(0), 2)
        push(coordinator, 0, now=1.0)
        assert coordinator.on_finish([0], 1.0) == Outcome()
        assert (coordinator.active, coordinator.held, coordinator.num_finished) == ((1,), (), 1)
        assert released(push(coordinator, 1, now=2.0)) == [1]

    def test_a_last_push_does_not_freeze_the_slowest_clock(self, begin):
        coordinator = begin(SSP(0), 3)
        push(coordinator, 0, now=1.0)
        push(coordinator, 1, now=1.0)
        outcome = push(coordinator, 2, now=2.0, is_last=True)
        assert outcome.apply == (2,)
        assert released(outcome) == [0, 1]
        assert coordinator.num_finished == 1
        assert released(push(coordinator, 0, 1, now=3.0)) == [0, 1]

    def test_several_at_once_and_everybody(self, begin):
        coordinator = begin(DSSP(), 3)
        push(coordinator, 0, now=1.0)
        coordinator.on_finish([0, 1, 2], 2.0)
        assert coordinator.num_active == 0
        assert coordinator.computing == coordinator.held == coordinator.active == ()
        assert coordinator.lead(0) == coordinator.run_ahead(0) == 0

    def test_a_failed_computing_worker_caps_nobody_any_more(self, begin):
        coordinator = begin(DSSP(2, 2), 3)
        for now in (1.0, 2.0, 3.0):
            push(coordinator, 0, 1, now=now)
        assert coordinator.held == (0, 1)
        assert released(coordinator.on_failure([2], 4.0)) == [0, 1]


class TestApplyPerPush:
    def test_pushes_with_a_gradient_in_worker_order(self, begin):
        coordinator = begin(ASP(), 3)
        pushes = [Push(2, 1.0), Push(0, 1.0), Push(1, 1.0, has_gradient=False)]
        outcome = coordinator.on_pushes(pushes, 1.0)
        assert outcome.apply == (0, 2)
        assert released(outcome) == [0, 1, 2]
        assert coordinator.clocks == (1, 1, 1)
        assert coordinator.num_pushes == 3


class TestReasons:
    def test_released(self, begin):
        coordinator = begin(DSSP.bounded(0, 9), 2)
        assert Coordinator(ASP(), 1).start(0.0).releases[0].reason == "worker 0 starts: the first grant"
        hold = push(coordinator, 0, now=1.0).holds[0]
        assert hold.reason == (
            "worker 0 held by the rule: lead 1 over worker 1 exceeds the bound 0, and the controller gives no "
            "extension; worker 1 has not pushed yet"
        )
        outcome = push(coordinator, 1, now=9.0)
        assert outcome.releases[0].reason == "worker 0 goes on: lead 0 is within the bound 0; waited 8 s"
        assert outcome.releases[1].reason == "worker 1 goes on: lead 0 is within the bound 0"
        outcome = push(coordinator, 0, now=10.0)
        assert outcome.releases[0].reason == (
            "worker 0 goes on by extension: lead 1 exceeds the bound 0, 7 left after this iteration"
        )

    def test_released_by_an_awaited_push(self, begin):
        coordinator = begin(DSSP(0, 4), 3)
        push(coordinator, 0, now=1.0)
        assert push(coordinator, 1, now=2.5).releases[0].reason == (
            "worker 0 goes on: a slowest worker has pushed since it was held (lead 1, the bound 0); "
            "waited 1.5 s"
        )

    def test_no_bound(self, begin):
        reason = push(begin(ASP(), 2), 0, now=1.0).releases[0].reason
        assert reason == "worker 0 goes on: lead 1 is within the bound inf"

    def test_held_by_the_rule(self, begin):
        coordinator = begin(SSP(0), 2)
        push(coordinator, 0, 1, now=1.0)
        assert push(coordinator, 0, now=1.5).holds[0].reason == (
            "worker 0 held by the rule: lead 1 over worker 1 exceeds the bound 0; "
            "worker 1's push is expected in 0.5 s"
        )

    def test_held_by_the_run_ahead_cap(self, begin):
        coordinator = begin(DSSP(15, 15), 4)
        push(coordinator, 0, 1, 2, 3, now=0.2)
        push(coordinator, 1, now=0.3)
        coordinator.on_finish([0, 2], 0.3)
        for i in range(16):
            outcome = push(coordinator, 3, now=0.3 + (i + 1) / 16 * 0.9)
        assert outcome.holds[0].reason == (
            "worker 3 held by the cap: run-ahead 16 over worker 1 exceeds s_upper 15; "
            "worker 1's push is 0.8 s late"
        )

    def test_held_by_the_lead_cap(self, begin):
        coordinator = begin(Rules(0, 1, grant="literal", cap="lead", release="gap"), 2)
        push(coordinator, 0, now=1.0)
        push(coordinator, 1, now=4.0)
        push(coordinator, 0, now=5.0)
        assert push(coordinator, 0, now=6.0).holds[0].reason == (
            "worker 0 held by the cap: lead 2 over worker 1 exceeds s_upper 1; "
            "worker 1's push is expected in 2 s"
        )
