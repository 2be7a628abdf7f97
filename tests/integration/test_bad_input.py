"""A hundred mistakes: one message each, exit code 2, nothing left behind, nothing hangs."""

from __future__ import annotations

import pytest
from bad_input import A_DOZEN, AFTER_TORCH, BEFORE_TORCH, fault
from launching import train

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]
LOCAL = ["transport=local", "num_workers=2"]


def test_there_are_a_hundred():
    assert len(BEFORE_TORCH) + len(AFTER_TORCH) >= 100


@pytest.mark.once
@pytest.mark.parametrize(("overrides", "words"), BEFORE_TORCH, ids=lambda v: " ".join(v)[:40])
def test_before_torch(tmp_path, overrides, words):
    assert not fault(train(*overrides, folder=tmp_path / "run"), words)


@pytest.mark.once
@pytest.mark.parametrize(("overrides", "words"), AFTER_TORCH, ids=lambda v: " ".join(v)[:40])
def test_after_torch(tmp_path, overrides, words):
    assert not fault(train(*LOCAL, *overrides, folder=tmp_path / "run"), words)


@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize(("overrides", "words"), A_DOZEN, ids=lambda v: " ".join(v)[:40])
def test_under_mpirun(tmp_path, overrides, words, ranks):
    assert not fault(train(*overrides, ranks=ranks, folder=tmp_path / "run"), words)
