"""Signals to the ranks of a real job: it ends in order, with everything saved, and the code says why."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from launching import started

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]


def ranks_of(folder):
    """The server's process, which has the evaluation process as a child, and the workers'."""
    servers, workers = [], []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if f"run_dir={folder}" in command and Path(command[0]).name.startswith("python"):
            is_server = any("hydssp.evaluation" in child.cmdline() for child in process.children())
            (servers if is_server else workers).append(process)
    return servers, workers


def wait_until_it_trains(process, folder):
    deadline = time.monotonic() + 60
    while not (folder / "events.jsonl").exists() or not (folder / "events.jsonl").stat().st_size:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("to", "number", "code", "status"),
    [
        ("server", signal.SIGTERM, 75, "preempted"),
        ("server", signal.SIGINT, 130, "interrupted"),
        ("worker", signal.SIGUSR1, 75, "preempted"),
        ("all", signal.SIGTERM, 75, "preempted"),
    ],
)
def test_a_rank_is_signalled(tmp_path, to, number, code, status):
    folder = tmp_path / "run"
    overrides = ["epochs=null", "max_time_s=100", "straggler=constant", "straggler.factors=[1,2]"]
    with started(*overrides, ranks=3, folder=folder) as process:
        wait_until_it_trains(process, folder)
        servers, workers = ranks_of(folder)
        assert (len(servers), len(workers)) == (1, 2)
        for target in {"server": servers, "worker": workers[:1], "all": servers + workers}[to]:
            target.send_signal(number)
        begun = time.monotonic()
        out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert time.monotonic() - begun < 20
    assert "Traceback" not in err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == status
    assert "signal" in summary["reason"]
    assert (folder / "weights.pt").stat().st_size > 0
    assert out.count("Run folder:") == 1


@pytest.mark.once
def test_the_local_transport_can_be_interrupted(tmp_path):
    folder = tmp_path / "run"
    overrides = ["transport=local", "num_workers=2", "epochs=null", "max_time_s=100"]
    with started(*overrides, folder=folder) as process:
        wait_until_it_trains(process, folder)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
