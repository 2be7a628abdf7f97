"""Ten short runs in a row and ten thousand updates; ``soak.py`` does a hundred."""

from __future__ import annotations

import pytest
from soak import growth_over_updates, short_runs

pytestmark = [pytest.mark.launch, pytest.mark.timeout(400)]


def test_ten_short_runs_leave_nothing_behind(tmp_path):
    assert not short_runs(10, tmp_path)


@pytest.mark.slow
@pytest.mark.once
def test_memory_is_flat_over_ten_thousand_updates(tmp_path):
    growth, figures = growth_over_updates(10_000, tmp_path)
    assert growth < 8, figures
