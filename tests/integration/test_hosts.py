"""Ranks on two hosts: the transport contract over a network, and a training run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import NAMES, TwoHosts, obstacle, two_hosts

CONTRACT = Path(__file__).resolve().parents[1] / "contract" / "test_mpi_transports.py"

pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    if why := obstacle():
        pytest.skip(why)
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_transport_contract_across_hosts(hosts: TwoHosts, tmp_path: Path, ranks_per_host: int) -> None:
    """With one rank per host everything goes over the network, with two some goes through shared memory."""
    ended = hosts.mpirun(
        *(
            "-m",
            "pytest",
            "-q",
            "--color=no",
            "-p",
            "no:cacheprovider",
            "--with-mpi",
            "-m",
            "mpi and not slow",
        ),
        str(CONTRACT),
        ranks_per_host=ranks_per_host,
        folder=tmp_path,
        timeout_s=360,
        rank_prefix=True,
    )
    assert ended.code == 0, ended.out + ended.err
    counts = re.findall(r"\[(\d+)\] (\d+) passed", ended.out)
    assert len(counts) == 2 * ranks_per_host, ended.out
    assert all(int(num_passed) > 50 for _, num_passed in counts), counts
    assert ended.cable_bytes > 100e6  # 40 MB each way by each transport, and more


@pytest.mark.parametrize("transport", ["rma", "two_sided"])
def test_training_across_hosts(hosts: TwoHosts, tmp_path: Path, transport: str) -> None:
    folder = tmp_path / "run"
    ended = hosts.mpirun(
        *("-m", "hydssp.train", "paradigm=dssp", f"transport={transport}", "epochs=3", f"run_dir={folder}"),
        ranks_per_host=2,
        folder=tmp_path,
        timeout_s=200,
    )
    assert ended.code == 0, ended.out + ended.err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["final_accuracy"] > 0.5  # chance is 0.1
    ranks = json.loads((folder / "environment.json").read_text())["ranks"]
    assert [fact["host"] for fact in ranks] == [NAMES[0]] * 2 + [NAMES[1]] * 2
    # Two workers on the other host: each pulls and pushes all weights, some 100 times together.
    assert ended.cable_bytes > 1e6
