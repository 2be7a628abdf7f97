"""Many short runs in a row, and one long one: nothing lingers, nothing grows.

python tests/integration/soak.py        # a hundred runs; ``test_soak.py`` does ten
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil
from launching import train

COMPLAINTS = ("leak", "unfreed", "not freed", "Traceback", "Error", "BAD TERMINATION", "segmentation")
"""What MPI libraries say of windows and memory that were left behind. Open MPI's line about UCX is silenced."""


def short_runs(count: int, folder: Path) -> list[str]:
    """``count`` runs of a second or two each, in turn with every transport and paradigm; returns what was wrong."""
    problems = []
    left_before = left_in_shared_memory()
    for number in range(count):
        paradigm = ("dssp", "bsp", "asp", "ssp")[number % 4]
        transport = ("rma", "rma", "two_sided")[number % 3]
        result = train(
            f"paradigm={paradigm}", f"transport={transport}", "epochs=1", "eval.every_epochs=5",
            ranks=2 + number % 3, folder=folder / str(number), timeout_s=90,
        )  # fmt: skip
        said = [c for c in COMPLAINTS if c in result.err]
        if result.code or said:
            problems.append(f"run {number}: code {result.code}, says {said}: {result.err[-300:]}")
        deadline = time.monotonic() + 5
        while (left := strays(result.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            problems.append(f"run {number}: left {left}")
    left = left_in_shared_memory() - left_before
    time.sleep(1)
    if left := left & left_in_shared_memory():  # what another program has just made is mapped by now
        problems.append(f"left in /dev/shm: {', '.join(sorted(left))}")
    return problems


def strays(folder: Path) -> list[str]:
    """Processes of a run that has ended."""
    commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [command for command in commands if f"run_dir={folder}" in command.split()]


def left_in_shared_memory() -> set[str]:
    """Files in /dev/shm that no process maps any more."""
    mapped = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mapped |= {region.path for region in process.memory_maps()}
    return {str(path) for path in Path("/dev/shm").rglob("*") if path.is_file()} - mapped


def growth_over_updates(updates: int, folder: Path) -> tuple[float, dict[str, list[int]]]:
    """Train for ``updates`` and compare each rank's resident memory after a fifth of them with that at the end.

    Returns:
        The largest growth, MiB, and both figures of every rank in bytes.
    """
    result = train(
        "epochs=null", f"max_updates={updates}", "progress_s=0.5", "batch_size=8", "events=full",
        ranks=3, folder=folder / "long", timeout_s=280,
    )  # fmt: skip
    assert result.code == 0, result.err
    records = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    records = [r for r in records if r["kind"] == "progress"]
    early = next(r for r in records if r["updates"] >= updates / 5 and all(r["memory_bytes"]))
    figures = {f"rank {rank}": [figure(early, rank), figure(records[-1], rank)] for rank in range(3)}
    return max(last - first for first, last in figures.values()) / 2**20, figures


def figure(record: dict, rank: int) -> int:
    """Resident memory of a rank, bytes."""
    return record["memory_bytes"][rank - 1] if rank else record["server_memory_bytes"]


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        begun = time.monotonic()
        problems = short_runs(100, Path(temporary))
        print("\n".join(problems))
        print(f"100 short runs in {time.monotonic() - begun:.0f} s, {len(problems)} problems")
        growth, figures = growth_over_updates(10_000, Path(temporary))
        print(f"10,000 updates: largest growth of a rank's resident memory {growth:.1f} MiB, {figures}")
    sys.exit(bool(problems) or growth > 8)


if __name__ == "__main__":
    main()
