"""Starts the real program under the mpirun of this environment, as a user would, and says what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from hydssp import config as configuration
from hydssp.observe.run_folder import RunFolder
from hydssp.simulation.forced import make_coordinator
from hydssp.simulation.recording import read_recording
from hydssp.simulation.replay import replay

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Result:
    """Exit code, standard output and error, and seconds from start to end."""

    code: int
    out: str
    err: str
    seconds: float
    folder: Path

    @property
    def summary(self) -> dict:
        """The run's summary.json."""
        return json.loads((self.folder / "summary.json").read_text())

    def events(self, kind: str) -> list[dict]:
        """The run's events of one kind."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["e"] == kind]


@cache
def mpirun() -> tuple[str, ...]:
    """The launcher beside this Python, or on the path, with what it needs for more ranks than cores."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    assert program, "no mpirun beside this Python or on the path: run ./scripts/test.sh"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return (program, "--oversubscribe") if "Open MPI" in version or "prte" in version.lower() else (program,)


def environment() -> dict[str, str]:
    """This process's variables, and those that a small machine needs."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_osc": "^ucx", "PYTHONPATH": str(HERE)}
    if os.geteuid() == 0:
        variables.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return variables


@contextlib.contextmanager
def started(
    *overrides: str,
    ranks: int = 0,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> Iterator[subprocess.Popen[str]]:
    """Start ``python -m hydssp.train`` in a process group of its own, which does not survive the block.

    Args:
        *overrides: Hydra overrides and flags.
        ranks: Started by mpirun on so many ranks; 0: without a launcher.
        folder: The run folder, beside which the program runs.
        variables: Further environment variables.
        wrapper: A command that starts Python on each rank.
    """
    arguments = ["-m", "hydssp.train", *overrides]
    if not any(o.startswith(("-", "run_dir=")) for o in overrides):
        arguments.append(f"run_dir={folder}")
    with python_on(ranks, arguments, folder, variables, wrapper) as process:
        yield process


@contextlib.contextmanager
def python_on(
    ranks: int,
    arguments: Sequence[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> Iterator[subprocess.Popen[str]]:
    """Start this Python with ``arguments``; see ``started``."""
    launcher = [*mpirun(), "-np", str(ranks)] if ranks else []
    command = [*launcher, *wrapper, sys.executable, *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), **(variables or {})},
        cwd=folder.parent,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def train(
    *overrides: str,
    ranks: int = 0,
    folder: Path,
    timeout_s: float = 120,
    variables: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> Result:
    """Run ``python -m hydssp.train``; the releases of a run that ended in order must come again in a replay.

    Args:
        *overrides: Hydra overrides and flags.
        ranks: Started by mpirun on so many ranks; 0: without a launcher.
        folder: The run folder.
        timeout_s: After it the whole process group is killed and the test fails.
        variables: Further environment variables.
        wrapper: A command that starts Python on each rank.
    """
    begun = time.monotonic()
    with started(*overrides, ranks=ranks, folder=folder, variables=variables, wrapper=wrapper) as process:
        out, err = ended(process, timeout_s)
    seconds = time.monotonic() - begun
    if process.returncode in (0, 75, 130):
        check_replay(folder)
    return Result(process.returncode, out, err, seconds, folder)


def check_replay(folder: Path) -> None:
    """Every release and hold that was recorded must be decided again; of no effect without a whole event log."""
    run = RunFolder(folder)
    if run.config.exists() and yaml.safe_load(run.config.read_text())["events"] == "full":
        recording = read_recording("replay", str(folder))
        paradigm = configuration.build_paradigm(recording.config)
        result = replay(recording, make_coordinator(paradigm, recording.num_workers))
        assert not result.differences, result.differences[:3]


def ended(process: subprocess.Popen[str], timeout_s: float) -> tuple[str, str]:
    """Standard output and error of a process that has to end in time."""
    try:
        return process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{process.args} did not end in {timeout_s} s\n{out}\n{err}") from None


def train_series(
    runs: Mapping[str, Sequence[str]], *, ranks: int, folder: Path, timeout_s: float = 300
) -> dict[str, Result]:
    """Many runs on the ranks of one launch, so that they start once; see ``series.py``.

    Args:
        runs: Overrides of each; its run folder has its name.
        ranks: Started by mpirun.
        folder: Of the run folders.
        timeout_s: For all of them together.

    Returns:
        What came of each, as rank 0 said it; every other rank is asserted to have said nothing.
    """
    asked, answered = folder / "runs.json", folder / "results.json"
    asked.write_text(json.dumps({name: [f"run_dir={folder / name}", *o] for name, o in runs.items()}))
    arguments = [str(HERE / "series.py"), str(asked), str(answered)]
    with python_on(ranks, arguments, folder / "unused") as process:
        out, err = ended(process, timeout_s)
    results = json.loads(answered.read_text()) if answered.exists() else {}
    assert process.returncode == 0, f"ended with {process.returncode} after {list(results)}\n{out}\n{err}"
    assert "hydssp" not in out + err, out + err
    for name, (code, *_) in results.items():
        if code in (0, 75, 130):
            check_replay(folder / name)
    return {name: Result(*result, folder / name) for name, result in results.items()}
