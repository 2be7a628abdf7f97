"""``python -m hydssp.train``: one process of a training job.

One job: find out which rank speaks, let rank 0 read the command line with Hydra, tell the others what to do, and leave
every rank with the same exit code. Imports neither torch nor MPI nor Hydra at its top: ``--help``, ``--cfg`` and a bad
override end before MPI is started, and processes that Python spawns import this module again.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from hydssp.abort import fail, guard
from hydssp.errors import UserError
from hydssp.launcher import Launch
from hydssp.signals import INTERRUPTED, PREEMPTED

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from hydssp.session import Session

OK, USAGE = 0, 2


class Leader:
    """Rank 0's part: runs each composed configuration on all ranks, then tells them to stop.

    Attributes:
        code: The exit code so far: the first that is not 0.
    """

    def __init__(self, launch: Launch) -> None:
        self.code = OK
        self._told = ""
        self._has_followed = False
        self._launch = launch
        self._session: Session | None = None

    def run(self, composed: DictConfig) -> None:
        """Check one configuration and train with it; after a signal, do no more."""
        if self._has_followed or self.code in (PREEMPTED, INTERRUPTED):
            return
        from hydssp import config
        from hydssp.command_line import check_choices, check_run_dir_of_several
        from hydssp.observe.run_folder import check_run_folder

        try:
            check_choices()
            check_run_dir_of_several()
            plain = config.to_plain(composed)
            config.check(plain)
            if plain["run_dir"] is not None:
                check_run_folder(plain["run_dir"])
            session = self._session_for(plain)
        except UserError as error:
            if str(error) != self._told:  # what is wrong with a whole series is said once
                self._told = str(error)
                print(f"hydssp: {error}", file=sys.stderr)
            self._note(USAGE)
            return
        if session is not None and session.rank != 0:
            # A launcher that sets no variable we know: only MPI could tell that this is not rank 0. Following ends
            # with rank 0's whole series, so that what this rank composed of it is not run again.
            self._has_followed = True
            self._note(follow(session))
            return
        if session is not None:
            session.broadcast(plain)
        try:
            from hydssp import job

            self._note(job.run(plain, session))
        except BaseException as error:
            # Hydra would print a shortened traceback and exit, and the other ranks would wait for ever.
            fail(error)

    def _note(self, code: int) -> None:
        self.code = self.code or code

    def _session_for(self, plain: dict[str, Any]) -> Session | None:
        """The session that the configuration needs; None for training in this one process."""
        if plain["transport"]["name"] == "local":
            if self._launch.is_launched:
                raise UserError(
                    f"transport=local trains in one process, but {self._launch.launcher} started {self._launch.size}; "
                    "start it without a launcher, or use transport=rma"
                )
            if plain["num_workers"] is None:
                raise UserError(
                    "num_workers=null: transport=local needs the number of workers, e.g. num_workers=3"
                )
            return None
        from hydssp.session import Session

        self._session = self._session or Session()
        size = self._session.size
        if size == 1 and self._launch.is_launched:
            raise UserError(
                f"{self._launch.launcher} started {self._launch.size} processes, but the MPI library that mpi4py loads "
                f"({self._session.library}) sees each of them alone; use the mpirun that belongs to this library"
            )
        if size == 1:
            raise UserError(
                "one process is not enough: rank 0 is the server, so that at least 2 ranks are needed; start it as "
                "mpirun -np 4 python -m hydssp.train, or train in one process with transport=local num_workers=3"
            )
        if plain["num_workers"] not in (None, size - 1):
            raise UserError(
                f"num_workers={plain['num_workers']}: under a launcher it is the number of ranks less one, here "
                f"{size - 1}; leave it out"
            )
        return self._session

    def finish(self) -> int:
        """Tell the other ranks to stop, and return the exit code."""
        if self._launch.is_launched and self._session is None:
            from hydssp.session import Session

            try:
                self._session = Session()
            except UserError as error:
                if not self.code:
                    print(f"hydssp: {error}", file=sys.stderr)
                return self.code or USAGE
        if self._session is not None and self._session.rank == 0 and self._session.size > 1:
            self._session.broadcast(self.code)
        return self.code


def lead(launch: Launch) -> int:
    """Rank 0: read the command line, run what it asks for."""
    from hydssp.application import run_composed

    leader = Leader(launch)
    leader.code = run_composed("train", leader.run) or leader.code
    return leader.finish()


def follow(session: Session) -> int:
    """Another rank: run the configurations that rank 0 sends until it sends an exit code."""
    if session.size == 1:
        return USAGE  # not in one world with the others; rank 0 says so
    while not isinstance(message := session.broadcast(), int):
        from hydssp import job

        job.run(message, session)
    return message


def main() -> int:
    """One process of the job; returns the exit code that all have agreed on."""
    launch = Launch.from_environment(os.environ)
    if launch.rank == 0:
        return lead(launch)
    from hydssp.session import Session

    try:
        session = Session()
    except UserError:  # rank 0 says so
        return USAGE
    return follow(session)


if __name__ == "__main__":
    guard(main)
