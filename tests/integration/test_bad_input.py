"""A hundred mistakes: one message each, exit code 2, nothing left behind, nothing hangs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from bad_input import A_DOZEN, AFTER_TORCH, BEFORE_TORCH, fault
from launching import train

pytestmark = [pytest.mark.launch, pytest.mark.timeout(900)]
LOCAL = ["transport=local", "num_workers=2"]


def faults(tmp_path, cases, *options):
    """What is wrong with the answers to ``cases``, two at a time, since most of a start is waiting for files."""

    def attempt(number):
        overrides, words = cases[number]
        problem = fault(train(*options, *overrides, folder=tmp_path / str(number)), words)
        return f"{overrides}: {problem}" if problem else ""

    with ThreadPoolExecutor(2) as pool:
        return [problem for problem in pool.map(attempt, range(len(cases))) if problem]


def test_there_are_a_hundred():
    assert len(BEFORE_TORCH) + len(AFTER_TORCH) >= 100


@pytest.mark.once
def test_in_one_process_before_torch(tmp_path):
    assert not faults(tmp_path, BEFORE_TORCH)


@pytest.mark.once
def test_in_one_process_after_torch(tmp_path):
    assert not faults(tmp_path, AFTER_TORCH, *LOCAL)


@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize(("overrides", "words"), A_DOZEN, ids=lambda v: " ".join(v)[:40])
def test_under_mpirun(tmp_path, overrides, words, ranks):
    assert not fault(train(*overrides, ranks=ranks, folder=tmp_path / "run"), words)
