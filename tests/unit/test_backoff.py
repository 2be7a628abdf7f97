import pytest

from hydssp.transport.backoff import SLEEP_MAX_S, SLEEP_MIN_S, SPIN_S, Backoff, choose_backoff


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.now += duration_s


def test_sleeps_double_up_to_the_longest() -> None:
    fake = FakeTime()
    backoff = Backoff(0.0, 50e-6, 1e-3, clock=fake.clock, sleep=fake.sleep)
    for _ in range(7):
        backoff.wait()
    assert fake.sleeps == pytest.approx([50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1e-3, 1e-3])


def test_reset_makes_the_next_sleep_short_again() -> None:
    fake = FakeTime()
    backoff = Backoff(0.0, 1.0, 8.0, clock=fake.clock, sleep=fake.sleep)
    backoff.wait()
    backoff.wait()
    backoff.reset()
    backoff.wait()
    assert fake.sleeps == [1.0, 2.0, 1.0]


def test_spins_first_and_again_after_reset() -> None:
    fake = FakeTime()
    backoff = Backoff(1.0, 0.25, 2.0, clock=fake.clock, sleep=fake.sleep)
    for at in (100.0, 100.5, 100.99):
        fake.now = at
        backoff.wait()
    assert fake.sleeps == []
    fake.now = 101.0
    backoff.wait()
    backoff.wait()
    assert fake.sleeps == [0.25, 0.5]
    backoff.reset()
    backoff.wait()
    assert fake.sleeps == [0.25, 0.5]


def test_spin_is_counted_from_the_first_wait_not_from_the_reset() -> None:
    fake = FakeTime()
    backoff = Backoff(1.0, 0.25, 2.0, clock=fake.clock, sleep=fake.sleep)
    fake.now += 50.0  # useful work between reset and wait
    backoff.wait()
    assert fake.sleeps == []


def test_without_a_spin_the_clock_is_not_read() -> None:
    def clock() -> float:
        raise AssertionError("read")

    Backoff(0.0, clock=clock, sleep=lambda duration_s: None).wait()


@pytest.mark.parametrize("bad", [(-1.0, 1.0, 2.0), (0.0, 0.0, 1.0), (0.0, 2.0, 1.0)])
def test_bad_durations_are_refused(bad: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="sleep_min_s"):
        Backoff(*bad)


@pytest.mark.parametrize(
    ("num_ranks", "num_cores", "spins"), [(1, 1, True), (4, 4, True), (5, 4, False), (2, 64, True)]
)
def test_spins_only_where_every_rank_has_a_core(num_ranks: int, num_cores: int, spins: bool) -> None:
    backoff = choose_backoff(num_ranks, num_cores)
    assert backoff._spin_s == (SPIN_S if spins else 0.0)
    assert (backoff._sleep_min_s, backoff._sleep_max_s) == (SLEEP_MIN_S, SLEEP_MAX_S)
