"""Ends the whole job when one rank cannot go on.

One job: make every exit that the ranks have not agreed on an MPI_Abort. Without it a rank that raises waits in
MPI_Finalize for the others, and they wait for it, until the walltime is over. Imports the standard library only and
is installed before torch, Hydra or MPI are imported, so that a failing import is covered too.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from hydssp.errors import TrainingError, UserError
from hydssp.launcher import Launch

FORWARD_S = 0.2
"""Before an abort, for the launcher to pass on what was printed: what lies in its pipe then can be lost (MPICH)."""


def guard(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` on this rank and leave the process with the code that it returns.

    ``main`` returns a code only when all ranks have agreed on it. Anything else that leaves it, an exception, an exit
    or an interrupt, ends all ranks: this rank's traceback is printed and MPI_Abort called with a non-zero code.
    """
    threading.excepthook = _thread_hook
    try:
        code = main()
    except BaseException as error:
        fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # A launcher that kills the job at the first non-zero exit must not change the code of the ranks behind it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


def fail(error: BaseException) -> NoReturn:
    """Say what happened and end all ranks; for guard, and for where an exception must not be let through.

    The code is 130 after an interrupt, that of an exit unless it is 0, else 1.
    """
    code = 1
    if isinstance(error, KeyboardInterrupt):
        code = 130
    elif isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code or 1
    what = f"left with exit code {error.code!r}" if isinstance(error, SystemExit) else "failed"
    sys.stdout.flush()
    # One write, so that the lines of several failing ranks do not mix.
    sys.stderr.write(f"hydssp: {_who()} {what} and ends the whole job\n{explanation(error)}")
    sys.stderr.flush()
    _abort(code)


def explanation(error: BaseException) -> str:
    """What to print of an exception that ends a process: a traceback where it is of use, and a plain last line."""
    if isinstance(error, TrainingError):
        its_cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        return f"{its_cause}{error}\n"
    if isinstance(error, UserError):
        return f"{error}\n"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full, or the quota used up: {error}\n"
    return "".join(traceback.format_exception(error))


def _who() -> str:
    launch = Launch.from_environment(os.environ)
    return f"rank {launch.rank} on {os.uname().nodename}"


def _thread_hook(args: Any) -> None:
    if args.exc_type is not SystemExit:  # a thread that exits ends only itself
        fail(args.exc_value)


def _abort(code: int) -> NoReturn:
    """Leave, and take the other ranks along.

    MPI is started for it when a launcher started several ranks and this one failed before it came to that: the others
    are waiting in MPI_Init for this rank.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if Launch.from_environment(os.environ).is_launched or "mpi4py.MPI" in sys.modules:
        try:
            from mpi4py import MPI
        except BaseException:
            os._exit(code)
        if not MPI.Is_finalized():
            time.sleep(FORWARD_S)
            MPI.COMM_WORLD.Abort(code)
    os._exit(code)
