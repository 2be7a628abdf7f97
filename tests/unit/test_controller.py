from __future__ import annotations

import pytest

from hydssp.coordination import extension

# (worker's latest and previous push), (slowest's latest and previous push), r_max, r*; no clamp.
VECTORS = {
    "A twice as fast, out of phase": ((10, 9), (9, 7), 12, 1),
    "B twice as fast, in phase": ((10, 9), (10, 8), 12, 2),
    "C three times": ((9, 8), (8, 5), 12, 2),
    "D ratio 2.5, short horizon": ((10, 9), (9.2, 6.7), 2, 2),
    "E ratio 1.4, ties in exact arithmetic": ((10, 9), (9.3, 7.9), 12, 2),
    "F equal speed": ((10, 9), (9.7, 8.7), 12, 1),
    "H equal speed, in phase": ((10, 9), (10, 9), 12, 1),
    "I r_max 0": ((10, 9), (9, 7), 0, 0),
    "J slow paused": ((20, 19), (4, 2), 4, 0),
    "L the paper's Figure 2": ((294, 235.5), (277, 176), 4, 3),
    "M ten times": ((50, 49), (45, 35), 12, 5),
    "P late": ((20, 19), (17.3, 14.9), 12, 2),
}


def ask(fast, slow, r_max, clamp):
    interval, slowest_interval = fast[0] - fast[1], slow[0] - slow[1]
    return extension(fast[0], interval, slow[0] + slowest_interval, slowest_interval, r_max, fast[0], clamp)


@pytest.mark.parametrize("name", VECTORS)
def test_vector(name):
    fast, slow, r_max, expected = VECTORS[name]
    assert ask(fast, slow, r_max, clamp=False) == expected


@pytest.mark.parametrize("name", VECTORS)
def test_clamp_changes_only_a_late_slowest(name):
    fast, slow, r_max, expected = VECTORS[name]
    is_late = name[0] in "JP"
    assert ask(fast, slow, r_max, clamp=True) == (0 if is_late else expected)


def test_a_slowest_due_now_is_not_late_but_worth_stopping_for():
    assert extension(10.0, 1.0, 10.0, 3.0, 12, now=10.0) == 0


def test_late_is_measured_against_now_not_against_the_push():
    assert extension(10.0, 1.0, 10.7, 3.0, 12, now=10.6) == 1
    assert extension(10.0, 1.0, 10.7, 3.0, 12, now=10.8) == 0
    assert extension(10.0, 1.0, 10.7, 3.0, 12, now=10.8, clamp=False) == 1


@pytest.mark.parametrize("interval", [0.0, -1.0])
def test_an_interval_of_the_worker_that_is_not_positive_gives_none(interval):
    assert extension(10.0, interval, 12.0, 3.0, 12, now=10.0) == 0


@pytest.mark.parametrize("slowest_interval", [0.0, -1.0, 5e-324])
def test_an_interval_of_the_slowest_that_is_not_positive_predicts_one_time(slowest_interval):
    assert extension(10.0, 1.0, 13.0, slowest_interval, 12, now=10.0) == 3


def test_ties_far_from_the_start_of_the_run_still_give_the_smallest():
    # As vector E, a month later: one ulp of the time is then larger than 1e-9 of an interval.
    shift = 2.6e6 + 0.1
    fast, slow = (10 + shift, 9 + shift), (9.3 + shift, 7.9 + shift)
    interval, slowest_interval = fast[0] - fast[1], slow[0] - slow[1]
    assert extension(fast[0], interval, slow[0] + slowest_interval, slowest_interval, 12, fast[0]) == 2
