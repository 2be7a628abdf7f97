"""Straggler patterns: the least time per (worker, iteration), and what they refuse."""

from __future__ import annotations

import dataclasses
import math

import pytest

from hydssp.errors import UserError
from hydssp.straggler import ConstantFactors, LongStall, NoStraggler, RandomPauses, Rotating, Straggler

ALL: list[Straggler] = [NoStraggler(), ConstantFactors(), RandomPauses(), Rotating(), LongStall()]


@pytest.mark.parametrize("straggler", ALL, ids=lambda s: type(s).__name__)
def test_defaults_fit_three_workers_and_give_finite_times(straggler: Straggler) -> None:
    straggler.check(3)
    times = [straggler.target_s(worker, iteration) for worker in range(3) for iteration in range(100)]
    assert all(0 <= time < 10 for time in times)


@pytest.mark.parametrize("straggler", ALL, ids=lambda s: type(s).__name__)
def test_patterns_are_frozen_and_hashable(straggler: Straggler) -> None:
    hash(straggler)
    with pytest.raises(dataclasses.FrozenInstanceError):
        straggler.iteration_s = 1.0  # type: ignore[attr-defined]


def test_none_never_pads() -> None:
    assert NoStraggler().target_s(7, 1234) == 0.0
    NoStraggler().check(1)


def test_constant_factors_per_worker() -> None:
    straggler = ConstantFactors([1, 2.5, 0], iteration_s=0.1)  # type: ignore[arg-type]
    assert straggler.factors == (1, 2.5, 0)
    assert [straggler.target_s(worker, 9) for worker in range(3)] == pytest.approx([0.1, 0.25, 0.0])


@pytest.mark.parametrize("num_workers", [2, 4])
def test_constant_factors_need_one_per_worker(num_workers: int) -> None:
    with pytest.raises(
        UserError, match=rf"straggler\.factors is .*3 factors for {num_workers} workers"
    ) as error:
        ConstantFactors().check(num_workers)
    example = str(error.value).split("straggler.factors=")[1]
    ConstantFactors(tuple(float(f) for f in example.strip("[]").split(","))).check(num_workers)


def test_random_pauses_take_one_of_two_times_at_the_given_rate() -> None:
    straggler = RandomPauses(probability=0.25, factor=4, iteration_s=0.5, seed=3)
    times = [straggler.target_s(worker, iteration) for worker in range(4) for iteration in range(2000)]
    assert set(times) == {0.5, 2.0}
    # Four standard deviations of a binomial count of 8,000.
    assert times.count(2.0) / len(times) == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 8000))


def test_random_pauses_depend_on_seed_worker_and_iteration_alone() -> None:
    def pauses(seed: int, worker: int) -> list[int]:
        straggler = RandomPauses(probability=0.3, factor=2, iteration_s=1, seed=seed)
        return [i for i in range(200) if straggler.target_s(worker, i) > 1]

    backwards = RandomPauses(probability=0.3, factor=2, iteration_s=1, seed=0)
    assert [i for i in reversed(range(200)) if backwards.target_s(0, i) > 1][::-1] == pauses(0, 0)
    assert pauses(0, 0) != pauses(0, 1)
    assert pauses(0, 0) != pauses(1, 0)
    # Pinned: the same in every process, Python version and machine.
    assert pauses(0, 0)[:8] == [0, 2, 3, 4, 15, 17, 18, 26]


def test_random_pauses_neighbouring_numbers_do_not_run_together() -> None:
    """Worker 1, iteration 11 and worker 11, iteration 1 are different draws."""
    straggler = RandomPauses(probability=0.5, factor=2, iteration_s=1)
    pairs = [(w, i) for w in range(1, 10) for i in range(10, 20)]
    assert any(
        straggler.target_s(w, i) != straggler.target_s(int(f"{w}{str(i)[0]}"), int(str(i)[1]))
        for w, i in pairs
    )


@pytest.mark.parametrize(("probability", "expected"), [(0.0, 1.0), (1.0, 3.0)])
def test_random_pauses_extremes(probability: float, expected: float) -> None:
    straggler = RandomPauses(probability=probability, factor=3, iteration_s=1)
    assert {straggler.target_s(0, iteration) for iteration in range(500)} == {expected}


def test_rotating_slows_each_worker_in_turn() -> None:
    straggler = Rotating(num_workers=3, period=2, factor=5, iteration_s=0.1)
    slow = [[w for w in range(3) if straggler.target_s(w, i) > 0.2] for i in range(8)]
    assert slow == [[0], [0], [1], [1], [2], [2], [0], [0]]
    assert straggler.target_s(0, 0) == pytest.approx(0.5)
    assert straggler.target_s(1, 0) == pytest.approx(0.1)


def test_rotating_needs_the_number_of_workers() -> None:
    with pytest.raises(UserError, match=r"set straggler\.num_workers=5"):
        Rotating(num_workers=3).check(5)


def test_long_stall_adds_its_time_once() -> None:
    straggler = LongStall(worker=1, at_iteration=4, duration_s=2, iteration_s=0.5)
    times = {(w, i): straggler.target_s(w, i) for w in range(3) for i in range(10)}
    assert times.pop((1, 4)) == 2.5
    assert set(times.values()) == {0.5}


def test_long_stall_needs_an_existing_worker() -> None:
    with pytest.raises(UserError, match=r"straggler\.worker is 3; allowed is 0 to 2"):
        LongStall(worker=3).check(3)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (ConstantFactors, "factors", (1.0, -1.0)),
        (ConstantFactors, "factors", (1.0, math.nan)),
        (ConstantFactors, "factors", "123"),
        (ConstantFactors, "factors", 2.5),
        (ConstantFactors, "iteration_s", -0.1),
        (ConstantFactors, "iteration_s", math.inf),
        (RandomPauses, "probability", -0.1),
        (RandomPauses, "probability", 1.1),
        (RandomPauses, "probability", math.nan),
        (RandomPauses, "factor", -1),
        (RandomPauses, "factor", "fast"),
        (RandomPauses, "iteration_s", math.nan),
        (RandomPauses, "seed", -1),
        (RandomPauses, "seed", 0.5),
        (Rotating, "num_workers", 0),
        (Rotating, "period", 0),
        (Rotating, "period", True),
        (Rotating, "factor", math.nan),
        (Rotating, "iteration_s", None),
        (LongStall, "worker", -1),
        (LongStall, "at_iteration", -1),
        (LongStall, "duration_s", math.inf),
        (LongStall, "iteration_s", -1),
    ],
)
def test_bad_values_are_refused_by_key(kind: type, key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^straggler\.{key} .*allowed"):
        kind(**{key: value})
