"""What the run ran on: versions, host, source revision, and which rank sits where.

Only collects; never fails on what it cannot find out (the value is then None) and starts no process, as
forking after MPI has started is unsafe on some fabrics. Does not import torch or mpi4py: what they say comes
from the installed package's metadata, from an already imported torch, or as an argument.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

_MAX_RANK_LINES = 16


def collect(
    argv: Sequence[str],
    *,
    mpi_vendor: str | None = None,
    mpi_library: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    ranks: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The content of ``environment.json``.

    Args:
        argv: The command line.
        mpi_vendor: Name and version of the MPI, as ``Open MPI 5.0.11``.
        mpi_library: The MPI library's own version string.
        directory: Where to look for a git checkout; None for the working directory.
        ranks: One ``rank_facts`` of each rank.
    """
    return {
        "argv": list(argv),
        "directory": os.fspath(directory) if directory is not None else _working_directory(),
        "git_revision": git_revision(directory),
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "cpu_affinity": cpu_affinity(),
        "memory_bytes": _memory_bytes(),
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) for name in ("hydssp", "torch", "numpy", "mpi4py")},
        },
        "torch": _torch_facts(),
        "mpi": {"vendor": mpi_vendor, "library": mpi_library.strip("\x00 \n") if mpi_library else None},
        "ranks": rank_map(ranks).ranks,
    }


def package_version(name: str) -> str | None:
    """Version of an installed package, without importing it; None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # A source tree on the path, as for hydssp itself, may have no metadata.
        return getattr(sys.modules.get(name), "__version__", None)


def cpu_affinity() -> list[int] | None:
    """Cores that this process may use; None where the system does not tell."""
    try:
        return sorted(psutil.Process().cpu_affinity())
    except (AttributeError, OSError, psutil.Error):
        return None


def git_revision(directory: str | os.PathLike[str] | None = None) -> str | None:
    """Commit checked out in the git repository around ``directory``, read from its files; else None."""
    try:
        start = Path(directory or ".").resolve()
        for folder in (start, *start.parents):
            git = folder / ".git"
            if git.is_file():  # a worktree or submodule: the file names the real place
                git = (folder / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).resolve()
            if git.is_dir():
                return _read_head(git)
    except (OSError, ValueError):
        pass
    return None


def _read_head(git: Path) -> str | None:
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head or None
    ref = head.removeprefix("ref:").strip()
    places = [git]
    if (git / "commondir").is_file():  # branches of a worktree lie with the main checkout
        places.append((git / (git / "commondir").read_text(encoding="utf-8").strip()).resolve())
    for place in places:
        if (place / ref).is_file():
            return (place / ref).read_text(encoding="utf-8").strip() or None
    for place in places:
        if (place / "packed-refs").is_file():
            for line in (place / "packed-refs").read_text(encoding="utf-8").splitlines():
                commit, _, name = line.partition(" ")
                if name == ref:
                    return commit
    return None


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _memory_bytes() -> int | None:
    try:
        return int(psutil.virtual_memory().total)
    except (OSError, psutil.Error):
        return None


def _torch_facts() -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return {"cuda": torch.version.cuda, "threads": torch.get_num_threads()}


# ---- ranks ----


class RankMap(NamedTuple):
    """Which rank sits where."""

    text: str
    """``rank -> host -> device``: a line for each rank; with many, for each run of like ranks on a host."""
    ranks: list[dict[str, Any]]
    """The facts, in rank order."""


def rank_facts(rank: int, role: str, device: str) -> dict[str, Any]:
    """What each rank says about itself, to be gathered: plain values only.

    Args:
        rank: MPI rank.
        role: ``server`` or ``worker``.
        device: As ``cpu`` or ``cuda:0``.
    """
    cores = cpu_affinity()
    return {
        "rank": rank,
        "role": role,
        "host": socket.gethostname(),
        "device": device,
        "process": os.getpid(),
        "num_cores": len(cores) if cores is not None else os.cpu_count(),
    }


def rank_map(facts: Sequence[Mapping[str, Any]]) -> RankMap:
    """Render which rank sits on which host and device.

    Args:
        facts: One ``rank_facts`` of each rank, in any order.
    """
    ranks = sorted((dict(fact) for fact in facts), key=lambda fact: fact["rank"])
    if len(ranks) <= _MAX_RANK_LINES:
        groups = [[fact] for fact in ranks]
    else:
        groups = []
        for fact in ranks:
            last = groups[-1][-1] if groups else None
            if last is not None and _is_next(last, fact):
                groups[-1].append(fact)
            else:
                groups.append([fact])
    cells = [
        (_ranges([fact["rank"] for fact in group]), group[0]["role"], group[0]["host"], _devices(group))
        for group in groups
    ]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(3)]
    lines = [
        f"rank {rank:<{widths[0]}}  {role:<{widths[1]}} -> {host:<{widths[2]}} -> {devices}"
        for rank, role, host, devices in cells
    ]
    return RankMap("\n".join(lines), ranks)


def _is_next(last: Mapping[str, Any], fact: Mapping[str, Any]) -> bool:
    is_alike = fact["host"] == last["host"] and fact["role"] == last["role"]
    return is_alike and bool(fact["rank"] == last["rank"] + 1)


def _devices(group: Sequence[Mapping[str, Any]]) -> str:
    """The devices of a group, numbers of one kind drawn together: ``cuda:0-3``, or ``cpu``."""
    by_kind: dict[str, set[int]] = {}
    for fact in group:
        kind, _, index = str(fact["device"]).partition(":")
        numbers = by_kind.setdefault(kind, set())
        if index.isdigit():
            numbers.add(int(index))
    return ", ".join(f"{kind}:{_ranges(sorted(n))}" if n else kind for kind, n in sorted(by_kind.items()))


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,5`` from ascending 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
