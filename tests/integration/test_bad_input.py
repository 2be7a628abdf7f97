"""A hundred mistakes: one message each, exit code 2, nothing left behind, nothing hangs."""

from __future__ import annotations

import json

import pytest
from bad_input import A_FEW, AFTER_TORCH, BEFORE_TORCH, ON_RANKS, fault
from launching import HERE, Result, ended, python_on, train, train_series

pytestmark = [pytest.mark.launch, pytest.mark.timeout(400)]
LOCAL = ["transport=local", "num_workers=2"]


def answers(tmp_path, cases, *options, modules=()):
    """What the program said to each of ``cases`` in one process; see ``forked.py``."""
    runs = tmp_path / "runs"
    runs.mkdir()
    asked, answered = tmp_path / "cases.json", tmp_path / "results.json"
    arguments = {}
    for number, (overrides, _) in enumerate(cases):
        folder = (
            []
            if any(o.startswith(("-", "run_dir=")) for o in overrides)
            else [f"run_dir={runs / str(number)}"]
        )
        arguments[str(number)] = [*options, *overrides, *folder]
    asked.write_text(json.dumps(arguments))
    with python_on(
        0, [str(HERE / "forked.py"), str(asked), str(answered), *modules], runs / "cwd"
    ) as process:
        out, err = ended(process, 300)
    assert process.returncode == 0, out + err
    return [Result(*said, runs / number) for number, said in json.loads(answered.read_text()).items()]


def faults(cases, results):
    """What is wrong with the results."""
    found = [fault(result, words) for result, (_, words) in zip(results, cases, strict=True)]
    return [
        f"{overrides}: {problem}" for (overrides, _), problem in zip(cases, found, strict=True) if problem
    ]


def test_there_are_a_hundred():
    assert len(BEFORE_TORCH) + len(AFTER_TORCH) >= 100


@pytest.mark.once
def test_in_one_process_before_torch(tmp_path):
    assert not faults(BEFORE_TORCH, answers(tmp_path, BEFORE_TORCH))


@pytest.mark.once
def test_in_one_process_after_torch(tmp_path):
    assert not faults(AFTER_TORCH, answers(tmp_path, AFTER_TORCH, *LOCAL, modules=["hydssp.job"]))


@pytest.mark.once
@pytest.mark.parametrize(("ranks", "cases"), [(3, [*AFTER_TORCH, *ON_RANKS]), (5, AFTER_TORCH[::3])])
def test_what_only_the_ranks_can_find_out(tmp_path, ranks, cases):
    """All ranks agree on the mistake, one of them tells it, and the next configuration is looked at."""
    runs = {str(number): overrides for number, (overrides, _) in enumerate(cases)}
    assert not faults(cases, [*train_series(runs, ranks=ranks, folder=tmp_path).values()])


@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize(("overrides", "words"), A_FEW, ids=lambda v: " ".join(v)[:40])
def test_under_mpirun(tmp_path, overrides, words, ranks):
    assert not fault(train(*overrides, ranks=ranks, folder=tmp_path / "run"), words)
