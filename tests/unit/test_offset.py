import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydssp.transport.messages import Stamps
from hydssp.transport.offset import ClockOffset


def exchange(estimator, at, offset_s, out_s, kept_s, back_s, speed=1.0):
    """Feed one exchange whose true times are known; the worker's clock is ``offset_s + speed * server's``."""
    received, replied = at + out_s, at + out_s + kept_s
    estimator.observe(at, offset_s + speed * received, offset_s + speed * replied, replied + back_s)


def test_symmetric_exchange_is_exact():
    estimator = ClockOffset()
    exchange(estimator, at=5.0, offset_s=123.0, out_s=0.25, kept_s=2.0, back_s=0.25)
    assert estimator.offset_s == pytest.approx(123.0)


def test_without_an_exchange_times_are_taken_as_they_are():
    estimator = ClockOffset()
    assert estimator.error_s(7.0) == math.inf
    assert estimator.to_server(Stamps(2.0, 3.0, grant_sent_at=1.0), received_at=4.0) == (2.0, 3.0)


def test_tightest_exchange_counts():
    estimator = ClockOffset()
    exchange(estimator, 0.0, -40.0, out_s=0.010, kept_s=0.1, back_s=0.0)
    exchange(estimator, 1.0, -40.0, out_s=0.0001, kept_s=0.1, back_s=0.0001)
    exchange(estimator, 2.0, -40.0, out_s=0.0, kept_s=0.1, back_s=0.010)
    assert estimator.offset_s == pytest.approx(-40.0, abs=1e-9)


def test_old_exchange_gives_way_when_drift_has_made_it_as_uncertain():
    estimator = ClockOffset(drift=50e-6)
    exchange(estimator, 0.0, 1.0, out_s=0.0, kept_s=0.0, back_s=0.0)
    exchange(estimator, 5.0, 9.0, out_s=0.0005, kept_s=0.0, back_s=0.0005)  # +- 0.5 ms against +- 0.25 ms
    assert estimator.offset_s == pytest.approx(1.0)
    exchange(estimator, 11.0, 9.0, out_s=0.0005, kept_s=0.0, back_s=0.0005)  # +- 0.5 ms against +- 0.55 ms
    assert estimator.offset_s == pytest.approx(9.0)


def test_long_kept_exchange_is_not_taken_for_a_tight_one():
    """A fast worker clock shrinks the round trip it seems to have had; that must not make it look better."""
    estimator = ClockOffset(drift=50e-6)
    exchange(estimator, 20.0, 5.0, out_s=0.0002, kept_s=0.0, back_s=0.0002, speed=1 + 40e-6)
    tight = estimator.offset_s
    exchange(estimator, 0.0, 5.0, out_s=0.0004, kept_s=20.1, back_s=0.0, speed=1 + 40e-6)
    assert estimator.offset_s == tight


@given(
    offset_s=st.floats(-1e4, 1e4),
    speed=st.floats(1 - 40e-6, 1 + 40e-6),
    seed=st.integers(0, 10_000),
)
def test_error_stays_within_its_bound(offset_s, speed, seed):
    estimator = ClockOffset(drift=50e-6)
    rng = random.Random(seed)
    at = 0.0
    for _ in range(50):
        at += rng.expovariate(0.5)
        out_s, kept_s, back_s = (rng.expovariate(1 / scale) for scale in (1e-3, 0.2, 1e-3))
        exchange(estimator, at, offset_s, out_s, kept_s, back_s, speed)
        now = at + out_s + kept_s + back_s
        true_offset_s = offset_s + speed * now - now
        assert abs(estimator.offset_s - true_offset_s) <= estimator.error_s(now) + 1e-9


@given(
    numbers=st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=5),
    kept_s=st.floats(0, 1e3),
    round_trip_s=st.floats(0, 1e3),
)
def test_mapped_times_keep_the_order_of_causes(numbers, kept_s, round_trip_s):
    offset_s, granted_at, sent_at, *_ = numbers
    estimator = ClockOffset()
    estimator.offset_s = offset_s
    received_at = sent_at + round_trip_s
    mapped = estimator.to_server(Stamps(granted_at, granted_at + kept_s, sent_at), received_at)
    assert sent_at <= mapped[0] <= mapped[1] <= received_at


def test_times_are_moved_only_as_far_as_needed():
    estimator = ClockOffset()
    estimator.offset_s = 10.0
    assert estimator.to_server(Stamps(11.5, 12.0, grant_sent_at=1.0), received_at=3.0) == (1.5, 2.0)
    assert estimator.to_server(Stamps(10.5, 13.5, grant_sent_at=1.0), received_at=3.0) == (1.0, 3.0)
