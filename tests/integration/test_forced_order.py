"""An asynchronous run, repeated: the recorded order forced on real ranks."""

from __future__ import annotations

import pytest
import torch
from launching import train

pytestmark = pytest.mark.launch

OPTIONS = ("epochs=4", "straggler=random", "straggler.iteration_s=0.004", "model.hidden=[16]")


def weights(result):
    assert result.code == 0, result.err
    return torch.load(result.folder / "weights.pt", weights_only=True)


def order(result):
    return [(push["w"], push["it"], push["v"]) for push in result.events("push")]


@pytest.mark.timeout(300)
def test_an_asynchronous_run_is_repeated_bit_for_bit(tmp_path):
    original = train("paradigm=dssp", *OPTIONS, ranks=4, folder=tmp_path / "original")
    forced = ("paradigm=recorded", f"paradigm.run={original.folder}", "transport.slots=16")
    # Other pauses, so that pushes arrive in another order than the one that is forced on them.
    again = train(*forced, *OPTIONS, "straggler.seed=7", ranks=4, folder=tmp_path / "again")
    assert order(original) == order(again)
    assert original.summary["staleness"]["max"] > 0
    a, b = weights(original), weights(again)
    assert all(torch.equal(a[key], b[key]) for key in a)
