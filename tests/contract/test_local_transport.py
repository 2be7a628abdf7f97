"""The transport contract on the in-process transport: all scripts interleaved at random, by a seed."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.register_assert_rewrite("transport_contract")

from transport_contract import (  # noqa: E402
    CASES,
    Case,
    Overwritten,
    WholeVersionsUnderOverwriting,
    calls_that_survive_close,
)

from hydssp.errors import UserError  # noqa: E402
from hydssp.transport.local import LocalFabric, LocalWorker  # noqa: E402

STEP_S = 100e-6
MAX_STEPS = 300_000


class LocalStage:
    can_overtake = True

    def __init__(self) -> None:
        self.words: set[str] = set()

    def tell(self, word: str) -> None:
        self.words.add(word)

    def heard(self, word: str) -> bool:
        return word in self.words


def run_local(case: Case, num_workers: int, seed: int) -> None:
    now = 1000.0
    fabric = LocalFabric(
        num_workers,
        case.numel,
        case.dtype,
        case.slots,
        clock=lambda: now,
        chunk_bytes=case.chunk_bytes,
        num_buffers=case.num_buffers,
        pull_dtype=case.pull_dtype,
        push_dtype=case.push_dtype,
    )
    stage = LocalStage()
    ends = [fabric.server, *fabric.workers]
    scripts = {0: case.server(fabric.server, stage)}
    scripts |= {1 + end.worker: case.worker(end, stage) for end in fabric.workers}
    results = {}
    rng = random.Random(seed)
    for _ in range(MAX_STEPS):
        now += STEP_S / len(ends)
        rank = rng.choice(list(scripts))
        try:
            next(scripts[rank])
        except StopIteration as end:
            results[rank] = end.value
            del scripts[rank]
            if not scripts:
                break
    assert not scripts, f"still waiting after {MAX_STEPS} steps: ranks {list(scripts)}"
    for end in ends:
        end.close()
        end.close()
        assert calls_that_survive_close(end) == []
    case.check(results[0], [results[1 + worker] for worker in range(num_workers)])


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_contract(case: Case, num_workers: int) -> None:
    for seed in range(3 if case.numel < 1_000_000 and not hasattr(case, "duration_s") else 1):
        run_local(case, num_workers, seed)


@pytest.mark.parametrize(
    "case",
    [WholeVersionsUnderOverwriting(is_slow=True), Overwritten(4, False), Overwritten(1, True)],
    ids=repr,
)
def test_suite_notices_a_ring_without_tags(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that believes every tag gets torn reads, and the contract must say so."""

    class Credulous(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            return True

    monkeypatch.setattr(LocalWorker, "read_tag", lambda self, slot: Credulous(0))
    with pytest.raises(AssertionError):
        run_local(case, num_workers=1, seed=0)


def test_ring_too_small_for_the_reader_is_an_error() -> None:
    """A reader that is overtaken by each of its reads gives up some time, and says what to do."""
    fabric = LocalFabric(1, numel=4, slots=3, clock=lambda: 0.0)
    server, worker = fabric.server, fabric.workers[0]
    server.begin_publish(0)
    server.end_publish()

    def read_under_overwriting() -> None:
        version = 0
        for _ in worker.pull_steps(np.zeros(4, np.float32), 0):
            for _ in range(3):
                version += 1
                server.begin_publish(version)
                server.end_publish()

    with pytest.raises(RuntimeError, match=r"transport\.slots=3"):
        read_under_overwriting()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"numel": 0}, "numel=0"),
        ({"dtype": np.float16}, "dtype=float16"),
        ({"pull_dtype": "int8"}, "wire.pull: elements of int8"),
        ({"push_dtype": "int8"}, "wire.push: elements of int8"),
        ({"slots": 2}, "transport.slots=2"),
        ({"num_buffers": -1}, "num_buffers=-1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        LocalFabric(**({"num_workers": 1, "numel": 1} | arguments), clock=lambda: 0.0)
