import dataclasses
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hydssp.transport.messages import (
    CLOCK_DTYPE,
    GRANT_DTYPE,
    Clock,
    Grant,
    Stamps,
    read_clock,
    read_grant,
    write_clock,
    write_grant,
)

int64 = st.integers(-(2**63), 2**63 - 1)
seconds = st.floats(allow_nan=False)


def through_bytes(record):
    """A copy by its bytes alone, as a transport makes it."""
    return np.frombuffer(record.tobytes(), record.dtype)


@given(
    clock=st.builds(
        Clock,
        iteration=int64,
        version=int64,
        samples=int64,
        correct=int64,
        loss=seconds,
        is_finite=st.booleans(),
        is_skipped=st.booleans(),
        pull_retries=int64,
        data_s=seconds,
        pull_s=seconds,
        compute_s=seconds,
        push_s=seconds,
    ),
    stamps=st.builds(Stamps, seconds, seconds, seconds),
    push_s=seconds,
)
def test_clock_message_comes_back_as_it_was(clock, stamps, push_s):
    record = np.zeros(1, CLOCK_DTYPE)
    write_clock(record, clock, stamps, push_s)
    assert read_clock(through_bytes(record)) == (dataclasses.replace(clock, push_s=push_s), stamps)


@given(
    grant=st.builds(
        Grant, iteration=int64, version=int64, epoch=int64, start=int64, count=int64, stop=st.booleans()
    ),
    sent_at=seconds,
)
def test_grant_comes_back_as_it_was(grant, sent_at):
    record = np.zeros(1, GRANT_DTYPE)
    write_grant(record, grant, sent_at)
    assert read_grant(through_bytes(record)) == (grant, sent_at)


def test_unknown_loss_stays_unknown_and_flags_are_booleans():
    record = np.zeros(1, CLOCK_DTYPE)
    write_clock(record, Clock(0, 0, samples=0, is_finite=False), Stamps(1.0, 2.0, 0.5), push_s=0.0)
    clock, _ = read_clock(record)
    assert math.isnan(clock.loss)
    assert clock.is_finite is False
    assert clock.is_skipped is False


def test_what_was_read_does_not_change_with_the_record():
    record = np.zeros(1, GRANT_DTYPE)
    write_grant(record, Grant(1, 2), sent_at=3.0)
    grant, _ = read_grant(record)
    write_grant(record, Grant(9, 9, stop=True), sent_at=9.0)
    assert grant == Grant(1, 2)


def test_records_have_no_padding_and_a_fixed_size():
    assert (CLOCK_DTYPE.itemsize, GRANT_DTYPE.itemsize) == (19 * 8, 11 * 8)
