from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydssp.coordination import BatchRange, RangeDealer, ShardDealer
from hydssp.errors import UserError


def test_continuous_dealing_with_a_partial_last_batch():
    dealer = RangeDealer(num_samples=10, batch_size=4, num_epochs=2)
    assert dealer.deal([2, 0]) == {2: BatchRange(0, 0, 4), 0: BatchRange(0, 4, 4)}
    assert not dealer.exhausted
    assert dealer.deal([0, 1]) == {0: BatchRange(0, 8, 2), 1: BatchRange(1, 0, 4)}
    assert dealer.deal([2]) == {2: BatchRange(1, 4, 4)}
    assert dealer.deal([1, 2]) == {1: BatchRange(1, 8, 2), 2: None}
    assert dealer.exhausted
    assert dealer.deal([0, 1, 2]) == {0: None, 1: None, 2: None}
    assert dealer.samples_dealt == 20


def test_a_round_does_not_cross_an_epoch():
    dealer = RangeDealer(num_samples=10, batch_size=4, num_epochs=2, rounds=True)
    for epoch in (0, 1):
        assert dealer.deal([0, 1]) == {0: BatchRange(epoch, 0, 4), 1: BatchRange(epoch, 4, 4)}
        assert dealer.deal([0, 1]) == {0: BatchRange(epoch, 8, 2), 1: BatchRange(epoch, 10, 0)}
    assert dealer.exhausted
    assert dealer.deal([0, 1]) == {0: None, 1: None}


def test_a_round_that_ends_with_the_epoch_has_no_empty_range():
    dealer = RangeDealer(num_samples=8, batch_size=4, rounds=True)
    assert dealer.deal([0, 1]) == {0: BatchRange(0, 0, 4), 1: BatchRange(0, 4, 4)}
    assert dealer.deal([0, 1]) == {0: BatchRange(1, 0, 4), 1: BatchRange(1, 4, 4)}


def test_a_round_of_fewer_workers_after_a_failure():
    dealer = RangeDealer(num_samples=10, batch_size=4, num_epochs=1, rounds=True)
    dealer.deal([0, 1])
    assert dealer.deal([1]) == {1: BatchRange(0, 8, 2)}
    assert dealer.exhausted


def test_more_workers_than_batches():
    ranges = RangeDealer(num_samples=3, batch_size=2, num_epochs=1, rounds=True).deal(range(4))
    assert [batch.count for batch in ranges.values()] == [2, 1, 0, 0]
    ranges = RangeDealer(num_samples=3, batch_size=2, num_epochs=1).deal(range(4))
    assert [batch and batch.count for batch in ranges.values()] == [2, 1, None, None]


def test_a_batch_larger_than_the_epoch_is_the_epoch():
    assert RangeDealer(3, 100).deal([0, 1]) == {0: BatchRange(0, 0, 3), 1: BatchRange(1, 0, 3)}


@pytest.mark.parametrize(
    ("num_epochs", "num_samples", "expected"),
    [(0.5, 9, 5), (1.1, 10, 11), (2.5, 7, 18), (0.1, 30, 3), (3, 7, 21), (1e-9, 10, 1), (1.0, 10, 10)],
)
def test_a_fractional_run_ends_after_the_ceiling_of_its_last_epoch(num_epochs, num_samples, expected):
    dealer = RangeDealer(num_samples, 4, num_epochs)
    while not dealer.exhausted:
        dealer.deal([0])
    assert dealer.samples_dealt == expected


def test_endless():
    dealer = RangeDealer(4, 4, None)
    for epoch in range(100):
        assert dealer.deal([0]) == {0: BatchRange(epoch, 0, 4)}
        assert not dealer.exhausted


def test_nobody_released_deals_nothing():
    dealer = RangeDealer(4, 4, 1, rounds=True)
    assert dealer.deal([]) == {}
    assert dealer.samples_dealt == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "0 samples: must be at least 1"),
        ((4, 0), "batch_size=0: must be an integer >= 1"),
        ((4, 4, 0), "epochs=0: must be a number > 0"),
        ((4, 4, -1.5), "epochs=-1.5: must be a number > 0"),
        ((4, 4, float("nan")), "epochs=nan: must be a number > 0"),
        ((4, 4, float("inf")), "epochs=inf: must be a number > 0"),
    ],
)
def test_wrong_numbers_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        RangeDealer(*arguments)


def positions(dealt, epoch):
    return sorted(p for r in dealt if r.epoch == epoch for p in range(r.start, r.start + r.count))


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    num_epochs=st.sampled_from([0.3, 1, 2, 2.5]),
    num_workers=st.integers(1, 6),
    data=st.data(),
)
def test_every_sample_is_dealt_once_per_epoch_to_whoever_comes(
    rounds, lookahead, num_samples, batch_size, num_epochs, num_workers, data
):
    dealer = RangeDealer(num_samples, batch_size, num_epochs, rounds, lookahead)
    dealt, workers = [], list(range(num_workers))
    while dealer.has_more(0):
        if rounds:
            if len(workers) > 1 and data.draw(st.integers(0, 9)) == 0:
                workers.pop()  # a failure between two rounds
            released = workers
        else:
            released = data.draw(st.lists(st.sampled_from(workers), unique=True, min_size=1))
        hint = dealer.upcoming(released[0])
        for worker, batch in dealer.deal(released).items():
            # Its own is never taken from the first that comes; later ones of the call may find theirs gone.
            assert rounds or hint is None or worker != released[0] or batch == hint
            assert batch is not None or not dealer.has_more(worker)
            if batch is not None:
                dealt.append(batch)
                assert batch.count <= batch_size
    assert all(batch is None for batch in dealer.deal(workers).values())
    for epoch in range(int(num_epochs)):
        assert positions(dealt, epoch) == list(range(num_samples))
    assert dealer.samples_dealt == sum(batch.count for batch in dealt)
    last = positions(dealt, int(num_epochs))
    assert last == list(range(math.ceil(round(num_epochs % 1, 9) * num_samples)))


def test_lookahead_deals_the_rounds_that_come_without_it():
    plain, ahead = (RangeDealer(100, 7, 3, rounds=True, lookahead=on) for on in (False, True))
    while plain.has_more(0):
        assert ahead.deal([0, 1, 2]) == plain.deal([0, 1, 2])
    assert not ahead.has_more(0)


def test_a_range_set_aside_is_taken_back_from_the_slowest():
    dealer = RangeDealer(num_samples=12, batch_size=4, num_epochs=1, lookahead=True)
    assert dealer.deal([0]) == {0: BatchRange(0, 0, 4)}
    assert dealer.upcoming(0) == BatchRange(0, 4, 4)
    assert dealer.deal([1]) == {1: BatchRange(0, 8, 4)}
    assert dealer.has_more(1)
    assert dealer.deal([1]) == {1: BatchRange(0, 4, 4)}  # worker 0 has not come back for it
    assert dealer.deal([0]) == {0: None}


class TestShards:
    def test_each_worker_goes_through_its_own(self):
        dealer = ShardDealer(num_samples=11, batch_size=3, num_epochs=2, num_workers=2)
        assert dealer.upcoming(1) == BatchRange(0, 5, 3)
        fast = [dealer.deal([1])[1] for _ in range(4)]
        assert positions(fast, 0) == positions(fast, 1) == list(range(5, 11))
        assert dealer.deal([1]) == {1: None}
        assert not dealer.has_more(1)
        assert dealer.has_more(0)
        slow = [dealer.deal([0])[0] for _ in range(4)]
        assert positions(slow, 0) == positions(slow, 1) == list(range(5))
        assert dealer.upcoming(0) is None

    def test_rounds_stay_in_one_epoch(self):
        dealer = ShardDealer(num_samples=7, batch_size=3, num_epochs=2, num_workers=2, rounds=True)
        rounds = []
        while dealer.has_more(0):
            rounds.append(dealer.deal([0, 1]))
        assert [{r.epoch for r in dealt.values()} for dealt in rounds] == [{0}, {0}, {1}, {1}]
        assert rounds[0] == {0: BatchRange(0, 0, 3), 1: BatchRange(0, 3, 3)}
        assert rounds[1] == {0: BatchRange(0, 3, 0), 1: BatchRange(0, 6, 1)}
        assert dealer.deal([0, 1]) == {0: None, 1: None}

    def test_fewer_samples_than_workers(self):
        with pytest.raises(UserError, match=r"data.sharding=static: 2 samples"):
            ShardDealer(2, 1, 1, 3)

    def test_endless(self):
        dealer = ShardDealer(4, 3, None, 2)
        assert [dealer.deal([0])[0].epoch for _ in range(3)] == [0, 1, 2]
        assert dealer.has_more(0)
