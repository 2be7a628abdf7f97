"""One rank fails: the whole job ends within seconds, with the first traceback and a non-zero code."""

from __future__ import annotations

import psutil
import pytest
from launching import train

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]

SECONDS = 30
"""Upper bound for start, imports and end together, on a loaded machine; a hang would last for ever."""


def fail(tmp_path, how, rank=1):
    overrides = ["loss._target_=faults.FailingLoss", f"+loss.how={how}", f"+loss.rank={rank}", "epochs=1000"]
    return train(*overrides, ranks=3, folder=tmp_path / "run", timeout_s=60)


def assert_no_strays(folder):
    """Launchers may return a moment before the last rank is gone."""
    ours = [p for p in psutil.process_iter(["cmdline"]) if f"run_dir={folder}" in (p.info["cmdline"] or [])]
    _, left = psutil.wait_procs(ours, timeout=5)
    assert not left


@pytest.mark.parametrize(
    ("how", "code"),
    [("raise", 1), ("exit", 3), ("exit0", 1), ("os_exit", None), ("kill", None), ("thread", 1)],
)
def test_worker_fails(tmp_path, how, code):
    result = fail(tmp_path, how)
    assert result.code == code if code is not None else result.code != 0
    assert result.seconds < SECONDS
    assert_no_strays(result.folder)
    if how == "raise":
        assert "ValueError: the model met a bad batch" in result.err
        assert result.err.count("Traceback") == 1
        assert "rank 1" in result.err
    if how == "exit":
        assert "rank 1" in result.err
        assert "left with exit code 3" in result.err


def test_last_rank_fails(tmp_path):
    result = fail(tmp_path, "raise", rank=2)
    assert result.code == 1
    assert "rank 2" in result.err


@pytest.mark.parametrize("rank", [0, 2])
def test_rank_killed_while_others_start(tmp_path, rank):
    result = train(
        "model._target_=faults.failing_model",
        f"+model.rank={rank}",
        ranks=3,
        folder=tmp_path / "run",
        timeout_s=60,
    )
    assert result.code != 0
    assert result.seconds < SECONDS


def test_server_is_killed(tmp_path):
    overrides = ["loss._target_=faults.FailingLoss", "+loss.how=kill_later", "+loss.rank=0", "epochs=null"]
    result = train(*overrides, "max_time_s=60", ranks=3, folder=tmp_path / "run", timeout_s=60)
    assert result.code != 0
    assert result.seconds < SECONDS
    assert_no_strays(result.folder)


@pytest.mark.parametrize("loader_workers", [0, 1])
@pytest.mark.once
def test_a_sample_cannot_be_read(tmp_path, loader_workers):
    overrides = ["data._target_=faults.data_with_a_damaged_file", f"data.loader_workers={loader_workers}"]
    result = train(*overrides, "epochs=1", ranks=2, folder=tmp_path / "run", timeout_s=60)
    assert result.code == 1
    said = "data: reading sample 700 of BreaksAt700 failed with OSError: image 700.png is truncated"
    assert said in result.err.splitlines()
    assert "faults.py" in result.err
    assert "hydssp/worker.py" not in result.err  # of no use to whoever has to mend the file
    assert_no_strays(result.folder)


@pytest.mark.once
def test_evaluation_fails(tmp_path):
    """An error in the evaluation process ends the job with that error, and the summary says so."""
    overrides = ["loss._target_=faults.FailingLoss", "+loss.how=evaluation", "epochs=null", "max_time_s=60"]
    result = train(*overrides, ranks=3, folder=tmp_path / "run", timeout_s=60)
    assert result.code == 1
    assert result.seconds < SECONDS
    assert "ValueError: the evaluation met a bad batch" in result.err
    assert result.summary["status"] == "failed"
    assert_no_strays(result.folder)
