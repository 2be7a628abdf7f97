"""Random worlds: nobody waits for ever, the bounds hold, and paradigms that should agree do."""

from __future__ import annotations

import json
import math

import pytest
from coordination_worlds import (
    ALL_SWITCHES,
    PRESETS,
    Reference,
    World,
    all_pairs_extension,
    in_short,
    random_world,
    replay,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hydssp.coordination import ASP, BSP, DSSP, SSP, Coordinator, RangeDealer, Rules, extension

worlds = st.builds(
    random_world, seed=st.integers(0, 2**32), num_workers=st.integers(1, 6), quota=st.integers(1, 40)
)


def dssp_rules(**fixed: str) -> st.SearchStrategy[Rules]:
    """Rules of DSSP over all switches, some of them fixed."""
    return st.builds(
        lambda switches, s_lower, r_max: Rules(s_lower, s_lower + r_max, **switches | fixed),
        st.sampled_from(ALL_SWITCHES),
        st.integers(0, 3),
        st.integers(0, 5),
    )


any_rules = st.one_of(st.sampled_from([paradigm.rules for paradigm in PRESETS]), dssp_rules(), dssp_rules())


def check_against_reference(world: World, rules: Rules) -> None:
    reference = Reference(rules, world.num_workers)

    def check(coordinator, event, outcome) -> None:
        assert in_short(replay(reference, event)) == in_short(outcome)
        coordinator.validate()
        assert set(coordinator.active) == reference.active
        assert set(coordinator.computing) == reference.computing
        assert coordinator.held == tuple(sorted(reference.held_since))
        for worker in coordinator.active:
            assert coordinator.lead(worker) == reference.lead(worker)
            assert coordinator.run_ahead(worker) == reference.run_ahead(worker)
        for decision in outcome.releases + outcome.holds:
            assert decision.reason

    run(world, rules, check)


@given(worlds, any_rules)
@settings(max_examples=500)
def test_decides_as_the_reference_and_nobody_waits_for_ever(world, rules):
    check_against_reference(world, rules)


@pytest.mark.parametrize("release", ["next_push", "gap"])
@pytest.mark.parametrize("cap", ["run_ahead", "lead", "none"])
def test_no_deadlock_in_any_combination_of_the_switches(cap, release):
    combinations = [
        switches for switches in ALL_SWITCHES if (switches["cap"], switches["release"]) == (cap, release)
    ]
    assert len(combinations) == 16
    for number, switches in enumerate(combinations):
        for seed in range(26):
            rules = Rules(s_lower := seed % 3, s_lower + seed % 5, **switches)
            world = random_world(seed * 1000 + number, 2 + seed % 5, 30)
            if seed < 5:
                check_against_reference(world, rules)
            else:
                run(world, rules)  # asserts that somebody computes as long as anybody is active


@given(worlds, st.one_of(dssp_rules(cap="lead"), st.builds(lambda s: SSP(s).rules, st.integers(0, 4))))
@settings(max_examples=400)
def test_lead_is_bounded_by_the_lead_cap_and_by_ssp(world, rules):
    trace = run(world, rules)
    assert all(grant.lead <= rules.s_upper for outcome in trace.outcomes for grant in outcome.releases)
    assert all(hold.lead <= rules.s_upper + 1 for outcome in trace.outcomes for hold in outcome.holds)
    assert trace.others_max <= (world.num_workers - 1) * (2 * rules.s_upper + 1)


@given(worlds, st.builds(DSSP.bounded, st.just(1), st.integers(1, 5)))
@settings(max_examples=400)
def test_largest_leads_are_counted_and_bounded(world, paradigm):
    leads = []
    last = []
    run(world, paradigm.rules, lambda coordinator, *_: last.append(coordinator))
    trace = run(world, paradigm.rules)
    for outcome in trace.outcomes:
        leads += [grant.lead for grant in outcome.releases]
    assert last[-1].lead_max_at_start == max(leads) <= paradigm.s_upper
    assert last[-1].lead_max <= paradigm.s_upper + 1


@given(worlds, dssp_rules(cap="run_ahead"))
@settings(max_examples=400)
def test_run_ahead_and_staleness_are_bounded_by_the_run_ahead_cap(world, rules):
    trace = run(world, rules)
    assert trace.one_other_max <= rules.s_upper + 1
    assert trace.staleness_max <= (world.num_workers - 1) * (rules.s_upper + 1)


@pytest.mark.parametrize(("num_workers", "s_upper"), [(2, 0), (2, 3), (3, 2), (5, 4)])
def test_run_ahead_and_staleness_bounds_are_reached(num_workers, s_upper):
    """One worker takes very long; the others run until the cap stops them, each at times of its own."""
    times = tuple((1 + worker / 100,) for worker in range(num_workers - 1))
    world = World((*times, (1000.0,)), (30,) * (num_workers - 1) + (1,), ("last",) * num_workers)
    trace = run(world, DSSP(s_upper, s_upper).rules)
    assert trace.one_other_max == s_upper + 1
    assert trace.staleness_max == (num_workers - 1) * (s_upper + 1)


@pytest.mark.parametrize("s", [0, 1, 4])
def test_lead_bounds_are_reached(s):
    world = World(((1.0,), (1000.0,)), (30, 1), ("last", "last"))
    for paradigm in (SSP(s), DSSP.bounded(s, s), DSSP.bounded(0, s)):
        last: list[Coordinator] = []
        run(world, paradigm.rules, lambda coordinator, *_, seen=last: seen.append(coordinator))
        if paradigm != DSSP.bounded(0, s):  # the slowest has no push yet, so no extension is given
            assert (last[-1].lead_max, last[-1].lead_max_at_start) == (s + 1, s)


@given(worlds, st.integers(0, 4))
@settings(max_examples=400)
def test_dssp_bounded_without_extension_is_ssp(world, s):
    trace = run(world, SSP(s).rules)
    other = Coordinator(DSSP.bounded(s, s), world.num_workers)
    assert [replay(other, event) for event in trace.events] == trace.outcomes


@given(worlds)
@settings(max_examples=400)
def test_ssp_0_releases_as_bsp_does(world):
    trace = run(world, BSP().rules)
    other = Coordinator(SSP(0), world.num_workers)
    outcomes = [replay(other, event) for event in trace.events]
    assert [outcome.releases for outcome in outcomes] == [outcome.releases for outcome in trace.outcomes]
    assert [outcome.holds for outcome in outcomes] == [outcome.holds for outcome in trace.outcomes]


@given(worlds)
@settings(max_examples=400)
def test_bsp_applies_every_gradient_in_rounds_and_none_is_stale(world):
    pushed: list[int] = []
    applied: list[int] = []
    active = set(range(world.num_workers))

    def check(coordinator, event, outcome) -> None:
        kind, what, _ = event
        if kind == "pushes":
            pushed.extend(push[0] for push in what if push[3])
        applied.extend(outcome.apply)
        if kind == "failure":
            for worker in active.intersection(what):
                if pushed.count(worker) > applied.count(worker):
                    pushed.remove(worker)  # was pending, and is dropped
        active.intersection_update(coordinator.active)
        if outcome.apply:
            assert list(outcome.apply) == sorted(set(outcome.apply))
            assert len({coordinator.clocks[worker] for worker in coordinator.active}) <= 1

    trace = run(world, BSP().rules, check)
    assert trace.staleness_max == 0
    assert sorted(applied) == sorted(pushed)


@given(worlds)
@settings(max_examples=400)
def test_asp_never_waits(world):
    trace = run(world, ASP().rules)
    for (kind, what, _), outcome in zip(trace.events, trace.outcomes, strict=True):
        assert outcome.holds == ()
        if kind == "pushes":
            assert [grant.worker for grant in outcome.releases] == [push[0] for push in what if not push[2]]


@given(worlds, any_rules)
@settings(max_examples=400)
def test_at_most_one_grant_per_own_push_plus_the_first(world, rules):
    num_pushed = [0] * world.num_workers
    num_granted = [0] * world.num_workers

    def check(_, event, outcome) -> None:
        if event[0] == "pushes":
            for push in event[1]:
                num_pushed[push[0]] += 1
        for grant in outcome.releases:
            num_granted[grant.worker] += 1
            assert num_granted[grant.worker] <= num_pushed[grant.worker] + 1
            assert grant.clock == num_pushed[grant.worker]

    trace = run(world, rules, check)
    assert trace.num_grants == num_granted


@given(worlds, any_rules)
@settings(max_examples=400)
def test_a_recorded_event_log_replays_to_the_same_releases(world, rules):
    trace = run(world, rules)
    fresh = Coordinator(rules, world.num_workers)
    stored = json.loads(json.dumps(trace.events))
    assert [replay(fresh, event) for event in stored] == trace.outcomes


times = st.one_of(st.integers(1, 40).map(float), st.floats(0.001, 100))


@given(times, times, st.floats(-50, 50), times, st.integers(0, 15), st.booleans())
@settings(max_examples=600)
def test_controller_agrees_with_all_pairs(latest, interval, until_due, slowest_interval, r_max, clamp):
    arguments = (latest, interval, latest + until_due, slowest_interval, r_max, latest, clamp)
    r = extension(*arguments)
    assert 0 <= r <= r_max
    best = all_pairs_extension(*arguments)
    if r != best:
        # Both are within the tolerance of the least distance; the sums are rounded differently at its edge.
        def distance(r: int) -> float:
            due = (latest + until_due + k * slowest_interval for k in range(r_max + 1))
            return min(abs(at - latest - r * interval) for at in due)

        assert math.isclose(distance(r), distance(best), rel_tol=0, abs_tol=1e-6)


@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.one_of(st.integers(1, 4), st.floats(0.05, 3.5)),
    st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=20),
    st.booleans(),
)
@settings(max_examples=400)
def test_every_sample_is_dealt_once_per_epoch(num_samples, batch_size, num_epochs, groups, rounds):
    dealer = RangeDealer(num_samples, batch_size, num_epochs, rounds)
    dealt: list[tuple[int, int]] = []
    while True:
        group = groups[len(dealt) % len(groups)]
        ranges = dealer.deal(sorted(group))
        assert list(ranges) == sorted(group)
        batches = [batch for batch in ranges.values() if batch is not None]
        if rounds:
            assert len({batch.epoch for batch in batches}) <= 1
            assert len(batches) in (0, len(group))
        for batch in batches:
            assert 0 <= batch.count <= batch_size
            dealt += [(batch.epoch, batch.start + i) for i in range(batch.count)]
        if not batches:
            break
    whole = math.floor(num_epochs)
    rest = dealer.samples_dealt - whole * num_samples
    assert abs(rest - (num_epochs - whole) * num_samples) < 1 + 1e-6
    assert dealt == [divmod(i, num_samples) for i in range(dealer.samples_dealt)]
    assert dealer.exhausted
