from __future__ import annotations

import pytest

from hydssp.coordination import BatchRange, RangeDealer
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
