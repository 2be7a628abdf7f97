"""The run folder: made once, never shared between two runs, its files replaced whole.

Knows where each file lies and nothing of what is in it. Reads no clock: the date in the name is an argument.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hydssp.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    """The files of one run. Constructing it makes nothing; ``create_run_folder`` does."""

    path: Path

    @property
    def config(self) -> Path:
        """The composed configuration."""
        return self.path / "config.yaml"

    @property
    def summary(self) -> Path:
        """What came out of the run; rewritten from time to time."""
        return self.path / "summary.json"

    @property
    def metrics(self) -> Path:
        """Progress and evaluation records, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Every push, update, release and hold, one JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def environment(self) -> Path:
        """Versions, hosts and devices."""
        return self.path / "environment.json"

    @property
    def weights(self) -> Path:
        """The final weights and buffers."""
        return self.path / "weights.pt"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints; whoever writes the first one makes it."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of the log files, one per rank."""
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        """The log file of one MPI rank."""
        return self.logs / f"rank_{rank:04d}.log"


def check_run_folder(path: str | os.PathLike[str]) -> None:
    """Refuse a folder that is not free. Claims nothing: the run that makes the folder first has it.

    For the very beginning, so that nobody waits for data and model to hear of it.

    Raises:
        UserError: When ``path`` exists and is not an empty folder, or cannot be looked into.
    """
    path = Path(path)
    try:
        is_taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise _cannot_make(path, error) from error
    if is_taken:
        raise _taken(path)


def create_run_folder(
    path: str | os.PathLike[str] | None,
    base: str | os.PathLike[str],
    paradigm_label: str,
    now: datetime,
) -> RunFolder:
    """Make a run folder with its ``logs``, and claim it against any other run.

    Args:
        path: The folder the user asked for; None for ``<base>/<date>_<time>_<paradigm>``.
        base: Folder of the default run folders, usually ``runs``.
        paradigm_label: Name of the paradigm; characters that do not belong into a file name become ``-``.
        now: Local time of the start.

    Raises:
        UserError: When ``path`` exists and is not an empty folder, or the folder cannot be made.
    """
    try:
        if path is not None:
            return _claim_explicit(Path(path))
        return _claim_default(Path(base), paradigm_label, now)
    except OSError as error:
        raise _cannot_make(Path(path) if path is not None else Path(base), error) from error


def _cannot_make(place: Path, error: OSError) -> UserError:
    return UserError(
        f"run_dir: cannot make the run folder in {str(place)!r} ({error.strerror or error}). "
        "Set run_dir to a folder that you may write to."
    )


def _taken(path: Path) -> UserError:
    return UserError(
        f"run_dir: {str(path)!r} exists and is not an empty folder; a run never overwrites another one. "
        "Choose a new folder, delete this one, or leave run_dir out to get a new folder for every run."
    )


def _claim_default(base: Path, paradigm_label: str, now: datetime) -> RunFolder:
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", paradigm_label).strip("-.") or "run"
    name = f"{now:%Y-%m-%d_%H%M%S}_{label}"
    base.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        # mkdir is the claim: it is atomic, also on a shared file system, and fails when another run was
        # first.
        folder = RunFolder(base / (name if attempt == 1 else f"{name}_{attempt}"))
        try:
            folder.path.mkdir()
        except FileExistsError:
            attempt += 1
            continue
        folder.logs.mkdir()
        return folder


def _claim_explicit(path: Path) -> RunFolder:
    folder = RunFolder(path)
    check_run_folder(path)
    path.mkdir(parents=True, exist_ok=True)
    try:
        # Of two runs that both found the folder empty, the one that makes logs/ has it.
        folder.logs.mkdir()
    except FileExistsError:
        raise _taken(path) from None
    return folder


def write_atomically(path: str | os.PathLike[str], content: str | bytes, *, is_durable: bool = True) -> None:
    """Replace a file whole: a reader sees the old content or the new, never a part.

    Args:
        path: The file; its folder exists.
        content: Text is written as UTF-8.
        is_durable: Wait until the content is on the disk (fsync), so that it survives a crash of the node as
            well. False for files rewritten inside the server loop, where fsync on a shared file system takes
            too long; a killed process loses nothing either way.

    Raises:
        OSError: When the file cannot be written; the old one is untouched and no temporary file stays.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Not tempfile: its mode 0600 would stay with the file and lock out the user's group.
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk shows at a flush, which names no file
        raise
