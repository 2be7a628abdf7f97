"""Log files: one per rank, and a console that hears of rank 0 only what matters.

Configures Python's logging and undoes it again; logs one line itself. Knows no MPI: the rank is an argument.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

from hydssp.errors import UserError

_DECISIONS = "hydssp.coordination"
_CONSOLE_GAP_S = 10.0
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class _ConsoleFilter(logging.Filter):
    """Warnings and above, and of the coordinator's decisions one line in ten seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._last_decision = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            return True
        if record.name != _DECISIONS or record.created - self._last_decision < _CONSOLE_GAP_S:
            return False
        self._last_decision = record.created
        return True


class _FileHandler(logging.FileHandler):
    """A disk that is full is no reason to stop, nor to print a traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Drop what cannot be written."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file; the stream tries once more to write what it could not."""
        with contextlib.suppress(OSError):
            super().close()


class _ConsoleHandler(logging.Handler):
    """Writes to what ``sys.stderr`` is at the moment, so that a live line on the terminal can step aside."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(_ConsoleFilter())

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; a console that went away is no reason to stop."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


_installed: list[logging.Handler] = []
_levels_before: dict[str, int] = {}


def configure_logging(rank: int, log_path: str | os.PathLike[str] | None, level: str = "INFO") -> None:
    """Send this rank's log to its file, and on rank 0 warnings and above to stderr as well.

    Handlers of an earlier call are closed and replaced, so that one process may do several runs. Python's
    warnings go the same way.

    Args:
        rank: MPI rank.
        log_path: The rank's file, appended to; its folder is made when missing. None for no file.
        level: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``; applies to the file, and for ``DEBUG`` to hydssp
            alone.

    Raises:
        UserError: When ``level`` is none of these, or the file cannot be opened.
    """
    level = level.upper()
    if level not in _LEVELS:
        raise UserError(f"log_level: {level!r} is not known; choose one of {', '.join(_LEVELS)}.")
    remove_logging()
    root, package = logging.getLogger(), logging.getLogger("hydssp")
    _levels_before.update({"": root.level, "hydssp": package.level})
    package.setLevel(level)
    # Debug lines of every other library would drown ours.
    root.setLevel(max(logging.INFO, package.level))
    form = logging.Formatter(f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s")
    if log_path is not None:
        try:
            Path(log_path).parent.mkdir(parents=True, exist_ok=True)
            file = _FileHandler(log_path, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"run_dir: cannot open the log file {str(log_path)!r} ({error.strerror or error}). "
                "Set run_dir to a folder that every rank may write to."
            ) from error
        file.setFormatter(form)
        _install(root, file)
    if rank == 0:
        console = _ConsoleHandler()
        console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        _install(root, console)
    logging.captureWarnings(True)
    logging.getLogger(__name__).info("rank %d on %s, process %d", rank, socket.gethostname(), os.getpid())


def remove_logging() -> None:
    """Undo ``configure_logging``: close its handlers and restore the levels; idempotent."""
    root = logging.getLogger()
    while _installed:
        handler = _installed.pop()
        root.removeHandler(handler)
        handler.close()
    for name, level in _levels_before.items():
        logging.getLogger(name).setLevel(level)
    if _levels_before:
        logging.captureWarnings(False)
    _levels_before.clear()


def _install(root: logging.Logger, handler: logging.Handler) -> None:
    root.addHandler(handler)
    _installed.append(handler)
