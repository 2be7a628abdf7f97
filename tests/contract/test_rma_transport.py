"""The transport contract on MPI windows, one script per rank, and what only real ranks can show.

Run as ``mpirun -np 4 python -m pytest --with-mpi tests/contract/test_rma_transport.py``; 2 ranks or more.
Every rank gathers what all ranks saw before it asserts, so that all take the same branch.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

pytest.register_assert_rewrite("transport_contract")

from transport_contract import (  # noqa: E402
    CASES,
    Case,
    Times,
    calls_that_survive_close,
    collect,
    grant_all,
    publish,
    stop_all,
    wait_for_grant,
    wait_until,
)

from hydssp.errors import UserError  # noqa: E402
from hydssp.transport.messages import Clock, Grant  # noqa: E402
from hydssp.transport.ring import WindowLayout  # noqa: E402

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.timeout(60),
    pytest.mark.skipif(find_spec("pytest_mpi") is None, reason="pytest-mpi is not installed"),
]

LIMIT_S = 30.0
"""A script that takes longer has failed; below the test's time-out, so that it can be told on which rank."""


class MpiStage:
    """Words as messages on a communicator of the tests' own."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm.Dup()
        self.words: set[str] = set()
        self.requests: list[Any] = []
        self.num_told = 0
        self.num_heard = 0

    def tell(self, word: str) -> None:
        self.words.add(word)
        self.num_told += 1
        others = set(range(self.comm.size)) - {self.comm.rank}
        self.requests += [self.comm.isend(word, dest=rank) for rank in others]

    def heard(self, word: str) -> bool:
        while self.comm.iprobe():
            self.words.add(self.comm.recv())
            self.num_heard += 1
        return word in self.words

    def gather(self, result: Any) -> list[Any]:
        """``result`` of all ranks, once all have come; then take leave."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(200e-6)
        gathered = self.comm.allgather((self.num_told, result))
        expected = sum(told for told, _ in gathered) - self.num_told
        while self.num_heard < expected:
            self.heard("")
        for request in self.requests:
            request.wait()
        self.comm.Free()
        return [result for _, result in gathered]


@pytest.fixture
def comm() -> Any:
    from mpi4py import MPI  # not at the top: a plain run collects this file without starting MPI

    return MPI.COMM_WORLD


def open_end(comm: Any, *args: Any) -> Any:
    from hydssp.transport.rma import RmaServer, RmaWorker

    return (RmaServer if comm.rank == 0 else RmaWorker)(comm, *args)


def run_script(script: Any, stage: MpiStage, pause_s: float) -> tuple[Any, str]:
    """What the script returns, and its error as text."""
    deadline = time.monotonic() + LIMIT_S
    try:
        while not stage.heard("failed"):
            next(script)
            if time.monotonic() > deadline:
                where = script.gi_frame.f_lineno if script.gi_frame else 0
                raise TimeoutError(f"{script.__qualname__} still waits after {LIMIT_S} s in line {where}")
            time.sleep(pause_s)
    except StopIteration as end:
        return end.value, ""
    except Exception:
        stage.tell("failed")
        return None, traceback.format_exc()
    return None, "stopped, because another rank failed"


def run_rma(case: Case, comm: Any) -> None:
    stage = MpiStage(comm)
    end = open_end(comm, case.numel, case.dtype, case.slots, case.chunk_bytes)
    script = case.server(end, stage) if comm.rank == 0 else case.worker(end, stage)
    result, error = run_script(script, stage, case.pause_s)
    gathered = stage.gather((result, error))
    end.close()
    end.close()
    survivors = comm.allgather(calls_that_survive_close(end))
    errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(gathered) if error]
    if errors:
        pytest.fail("\n".join(errors))
    assert survivors == [[]] * comm.size
    case.check(gathered[0][0], [result for result, _ in gathered[1:]])


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_contract(case: Case, comm: Any) -> None:
    run_rma(case, comm)


class BeyondTwoGibibytes(Case):
    """Slots that lie more than 2**31 bytes from the start of the window."""

    numel = 1 << 18
    slots = 2100

    def server(self, end, stage):
        newest = self.slots - 1  # in the last slot
        for version in range(newest):
            end.begin_publish(version)  # left as it is: only pages that are used cost memory
            end.end_publish()
        publish(end, newest, value=7.0)
        grant_all(end, Grant(0, version=newest, count=1))
        yield from collect(end, end.num_workers)
        values = [np.unique(end.gradient(worker)).tolist() for worker in range(end.num_workers)]
        stop_all(end)
        return values

    def worker(self, end, stage):
        grant = yield from wait_for_grant(end)
        out = np.zeros(self.numel, self.dtype)
        end.pull(out, grant.version)
        values = np.unique(out).tolist()
        out[:] = end.worker + 0.5
        end.push(out, Clock(0, 0, samples=1))
        assert (yield from wait_for_grant(end)).stop
        return values

    def check(self, server, workers):
        assert server == [[worker + 0.5] for worker in range(len(workers))]
        assert workers == [[7.0]] * len(workers)


def test_displacements_beyond_two_gibibytes(comm: Any) -> None:
    case = BeyondTwoGibibytes()
    layout = WindowLayout(comm.size - 1, case.numel, np.dtype(case.dtype), case.slots)
    assert layout.weights_offset(case.slots - 1) > 2**31
    run_rma(case, comm)


class TimesOnOneHost(Case):
    """On one host the system's monotonic clock says what the mapped times should be."""

    num_iterations = 30

    def server(self, end, stage):
        publish(end, 0)
        base = time.monotonic() - end.now()
        pushed_at = [[] for _ in range(end.num_workers)]
        for iteration in range(self.num_iterations):
            grant_all(end, Grant(iteration, version=0))
            for push in (yield from collect(end, end.num_workers)):
                pushed_at[push.worker].append(base + push.pushed_at)
        stop_all(end)
        return pushed_at

    def worker(self, end, stage):
        pushed_at = []
        while not (grant := (yield from wait_for_grant(end))).stop:
            yield from wait_until(end, end.now() + 0.003)
            end.push(None, Clock(grant.iteration, grant.version, samples=0))
            pushed_at.append(time.monotonic())
        return pushed_at

    def check(self, server, workers):
        for mapped, measured in zip(server, workers, strict=True):
            errors_s = np.abs(np.subtract(mapped, measured))
            assert np.median(errors_s) < 0.002


@pytest.mark.parametrize("case", [Times(), TimesOnOneHost()], ids=repr)
def test_times_of_clocks_that_differ(case: Case, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker's clock is put wrong by minutes, and the server must not notice."""
    from mpi4py import MPI

    from hydssp.transport.rma import RmaWorker

    if comm.Get_attr(MPI.WTIME_IS_GLOBAL):
        pytest.skip("this MPI has one clock for all ranks")
    right = RmaWorker.now
    wrong_s = 300.0 * comm.rank * (-1) ** comm.rank
    monkeypatch.setattr(RmaWorker, "now", lambda self: right(self) + wrong_s)
    run_rma(case, comm)


class IdleIsCheap(Case):
    """An idle server and held workers, waiting as the real loops do."""

    wall_s = 1.5

    def __init__(self, backoff: Any) -> None:
        self.backoff = backoff

    def burn(self, end: Any, poll: Any) -> float:
        """Share of a core that waiting with ``poll`` costs."""
        until = end.now() + self.wall_s
        cpu_s = time.process_time()
        self.backoff.reset()
        while end.now() < until:
            assert not poll()
            self.backoff.wait()
        return (time.process_time() - cpu_s) / self.wall_s

    def server(self, end, stage):
        yield
        share = self.burn(end, end.receive)
        stop_all(end)
        return share

    def worker(self, end, stage):
        share = self.burn(end, end.poll_grant)
        assert (yield from wait_for_grant(end)).stop
        return share

    def check(self, server, workers):
        assert max([server, *workers]) < 0.1


def test_waiting_costs_less_than_a_tenth_of_a_core(comm: Any) -> None:
    from hydssp.transport.rma import node_backoff

    run_rma(IdleIsCheap(node_backoff(comm)), comm)


def test_waiting_for_others_at_open_and_close_is_cheap(comm: Any) -> None:
    """Rank 0 comes a second late to each; nobody burns a core meanwhile."""
    late_s = 1.0
    shares = []

    def enter(step: Any) -> Any:
        comm.Barrier()
        if comm.rank == 0:
            time.sleep(late_s)
        cpu_s = time.process_time()
        result = step()
        shares.append((time.process_time() - cpu_s) / late_s)
        return result

    end = enter(lambda: open_end(comm, 1000))
    enter(end.close)
    gathered = comm.allgather(shares)
    assert np.max(gathered) < 0.3, gathered


def resources() -> tuple[int, int]:
    """Open files and address space (bytes) of this process."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_runs_in_one_process_leak_nothing(comm: Any) -> None:
    numel = 1 << 20
    num_cycles = 12

    def server(end: Any) -> Any:
        publish(end, 0)
        grant_all(end, Grant(0, version=0, count=1))
        yield from collect(end, end.num_workers)
        stop_all(end)

    def worker(end: Any) -> Any:
        yield from wait_for_grant(end)
        out = np.zeros(numel, np.float32)
        end.pull(out, 0)
        end.push(out, Clock(0, 0, samples=1))
        yield from wait_for_grant(end)

    def cycle() -> None:
        with open_end(comm, numel) as end:
            for _ in server(end) if comm.rank == 0 else worker(end):
                time.sleep(50e-6)

    for _ in range(4):
        cycle()
    files, size = resources()
    for _ in range(num_cycles):
        cycle()
    now_files, now_size = resources()
    growth = comm.allgather((now_files - files, now_size - size))
    assert all(files <= 2 and size < 4 * numel * num_cycles for files, size in growth), growth


def test_leaving_by_an_exception_does_not_wait_for_the_others(comm: Any) -> None:
    """The ``with`` block must not enter a collective call that nobody else enters."""
    end = open_end(comm, 10)
    try:
        with end:
            raise KeyError("a fault")
    except KeyError:
        was_open = calls_that_survive_close(end) != []
    assert comm.allgather(was_open) == [True] * comm.size
    stage = MpiStage(comm)
    stage.gather(None)
    end.close()


@pytest.mark.parametrize("key", ["numel", "dtype", "slots"])
def test_ranks_that_disagree_are_told_on_every_rank(comm: Any, key: str) -> None:
    mine = {"numel": 10, "dtype": "float32", "slots": 4}
    if comm.rank == comm.size - 1:
        mine[key] = {"numel": 11, "dtype": "float64", "slots": 5}[key]
    message = ""
    try:
        open_end(comm, mine["numel"], mine["dtype"], mine["slots"])
    except UserError as error:
        message = str(error)
    messages = comm.allgather(message)
    assert all(f"{key}: rank {comm.size - 1} has" in message for message in messages), messages


def test_bad_arguments_are_refused_on_every_rank(comm: Any) -> None:
    message = ""
    try:
        open_end(comm, 10, "float32", 2)
    except UserError as error:
        message = str(error)
    assert all("transport.slots=2" in message for message in comm.allgather(message))


def test_one_rank_is_not_enough(comm: Any) -> None:
    from mpi4py import MPI

    with pytest.raises(UserError, match="two or more ranks"):
        open_end(MPI.COMM_SELF, 10)
