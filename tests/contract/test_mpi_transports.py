"""The transport contract on each MPI transport, one script per rank, and what only real ranks can show.

Run as ``mpirun -np 4 python -m pytest --with-mpi tests/contract/test_mpi_transports.py``; 2 ranks or more.
Every rank gathers what all ranks saw before it asserts, so that all take the same branch.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass, field
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
    is_refused,
    publish,
    stop_all,
    wait_for_grant,
    wait_until,
)

from hydssp.errors import UserError  # noqa: E402
from hydssp.transport.memory import free_memory  # noqa: E402
from hydssp.transport.messages import Clock, Grant  # noqa: E402
from hydssp.transport.ring import WindowLayout  # noqa: E402

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.timeout(60),
    pytest.mark.skipif(find_spec("pytest_mpi") is None, reason="pytest-mpi is not installed"),
]


@dataclass(frozen=True)
class Kind:
    """One transport to be tested."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "-".join([self.name, *self.options])

    def open(self, comm: Any, numel: int, dtype: str = "float32", **options: Any) -> Any:
        """This rank's end."""
        from hydssp.transport.opening import open_server, open_worker

        open_end = open_server if comm.rank == 0 else open_worker
        return open_end(self.name, comm, numel, dtype, **options, **self.options)


RMA = Kind("rma")
KINDS = [RMA, Kind("rma", {"request_based": True}), Kind("two_sided")]


class MpiStage:
    """Words as messages on a communicator of the tests' own."""

    def __init__(self, comm: Any, can_overtake: bool = True) -> None:
        self.can_overtake = can_overtake
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


@pytest.fixture(params=KINDS, ids=repr)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def run_script(script: Any, stage: MpiStage, case: Case) -> tuple[Any, str]:
    """What the script returns, and its error as text."""
    deadline = time.monotonic() + case.limit_s
    try:
        while not stage.heard("failed"):
            next(script)
            if time.monotonic() > deadline:
                where = script.gi_frame.f_lineno if script.gi_frame else 0
                raise TimeoutError(
                    f"{script.__qualname__} still waits after {case.limit_s} s in line {where}"
                )
            time.sleep(case.pause_s)
    except StopIteration as end:
        return end.value, ""
    except Exception:
        stage.tell("failed")
        return None, traceback.format_exc()
    return None, "stopped, because another rank failed"


def run_case(case: Case, comm: Any, kind: Kind) -> None:
    stage = MpiStage(comm, can_overtake=kind.name == "rma")
    end = kind.open(
        comm,
        case.numel,
        case.dtype,
        slots=case.slots,
        chunk_bytes=case.chunk_bytes,
        num_buffers=case.num_buffers,
        pull_dtype=case.pull_dtype,
        push_dtype=case.push_dtype,
    )
    script = case.server(end, stage) if comm.rank == 0 else case.worker(end, stage)
    result, error = run_script(script, stage, case)
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
def test_contract(case: Case, comm: Any, kind: Kind) -> None:
    run_case(case, comm, kind)


class FarSlots(Case):
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


def skip_unless_free(comm: Any, shared_bytes: int, other_bytes: int = 0) -> None:
    """Skip on all ranks when the node of rank 0 has not that much shared and other memory."""
    free_shared, free = comm.bcast(free_memory(is_shared=True))
    if shared_bytes > (free_shared or 0) or shared_bytes + other_bytes > free:
        pytest.skip(
            f"needs {shared_bytes:,} bytes of shared memory (free: {free_shared}) and "
            f"{shared_bytes + other_bytes:,} of memory (free: {free:,})"
        )


def test_displacements_beyond_two_gibibytes(comm: Any) -> None:
    case = FarSlots()
    layout = WindowLayout(comm.size - 1, case.numel, np.dtype(case.dtype), case.slots)
    assert layout.weights_offset(case.slots - 1) > 2**31
    skip_unless_free(comm, layout.total_bytes)
    run_case(case, comm, RMA)


class LongVectors(Case):
    """One vector of more than 2**31 bytes each way. What it holds tells where each element belongs."""

    numel = 545_000_000
    slots = 3
    limit_s = 100.0
    block = 1 << 20

    def fill(self, vector: np.ndarray, first: float) -> None:
        for number, start in enumerate(range(0, self.numel, self.block)):
            vector[start : start + self.block] = first + number

    def is_filled(self, vector: np.ndarray, first: float) -> bool:
        return all(
            (vector[start : start + self.block] == first + number).all()
            for number, start in enumerate(range(0, self.numel, self.block))
        )

    def server(self, end, stage):
        self.fill(end.begin_publish(0), 0.0)
        end.end_publish()
        end.grant(0, Grant(0, version=0, count=1))
        yield from collect(end, 1)
        is_right = self.is_filled(end.gradient(0), 1000.0)
        stop_all(end)
        return is_right

    def worker(self, end, stage):
        grant = yield from wait_for_grant(end)
        out = np.empty(self.numel, self.dtype)
        end.pull(out, grant.version)
        is_right = self.is_filled(out, 0.0)
        self.fill(out, 1000.0)
        end.push(out, Clock(0, 0, samples=1))
        assert (yield from wait_for_grant(end)).stop
        return is_right

    def check(self, server, workers):
        assert server
        assert workers == [True]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", [RMA, Kind("two_sided")], ids=repr)
def test_counts_beyond_two_gibibytes(comm: Any, kind: Kind) -> None:
    if comm.size != 2:
        pytest.skip("takes 9 GB with two ranks, and is the same with more")
    case = LongVectors()
    vector_bytes = 4 * case.numel
    assert vector_bytes > 2**31
    skip_unless_free(comm, shared_bytes=4 * vector_bytes, other_bytes=vector_bytes)
    run_case(case, comm, kind)


def test_a_window_that_does_not_fit_is_refused_on_every_rank(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is allocated; and the transport can be opened afterwards."""
    with monkeypatch.context() as patch:
        patch.setattr("hydssp.transport.rma.free_memory", lambda is_shared: (1000, 10**9))
        message = ""
        try:
            RMA.open(comm, 10_000)
        except UserError as error:
            message = str(error)
    messages = comm.allgather(message)
    assert all("/dev/shm" in message for message in messages), messages
    RMA.open(comm, 10_000).close()


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
def test_times_of_clocks_that_differ(
    case: Case, comm: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker's clock is put wrong by minutes, and the server must not notice."""
    from hydssp.transport.mpi import MpiWorker

    right = MpiWorker.now
    wrong_s = 300.0 * comm.rank * (-1) ** comm.rank
    monkeypatch.setattr(MpiWorker, "now", lambda self: right(self) + wrong_s)
    run_case(case, comm, kind)


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


def test_waiting_costs_less_than_a_tenth_of_a_core(comm: Any, kind: Kind) -> None:
    from hydssp.transport.mpi import node_backoff

    run_case(IdleIsCheap(node_backoff(comm)), comm, kind)


def test_waiting_for_others_at_open_and_close_is_cheap(comm: Any, kind: Kind) -> None:
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

    end = enter(lambda: kind.open(comm, 1000))
    enter(end.close)
    gathered = comm.allgather(shares)
    assert np.max(gathered) < 0.3, gathered


def resources() -> tuple[int, int]:
    """Open files and address space (bytes) of this process."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_runs_in_one_process_leak_nothing(comm: Any, kind: Kind) -> None:
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
        with kind.open(comm, numel) as end:
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


def test_leaving_by_an_exception_does_not_wait_for_the_others(comm: Any, kind: Kind) -> None:
    """The ``with`` block must not enter a collective call that nobody else enters."""
    end = kind.open(comm, 10)
    try:
        with end:
            raise KeyError("a fault")
    except KeyError:
        was_open = not is_refused(RuntimeError, end.receive if comm.rank == 0 else end.poll_grant)
    assert comm.allgather(was_open) == [True] * comm.size
    stage = MpiStage(comm)
    stage.gather(None)
    end.close()


@pytest.mark.parametrize("key", ["wire.pull", "wire.push"])
def test_ranks_that_disagree_on_the_wire_are_told_on_every_rank(comm: Any, kind: Kind, key: str) -> None:
    argument = {"wire.pull": "pull_dtype", "wire.push": "push_dtype"}[key]
    mine = {argument: "float16" if comm.rank == comm.size - 1 else "uint16"}
    message = ""
    try:
        kind.open(comm, 10, **mine)
    except UserError as error:
        message = str(error)
    messages = comm.allgather(message)
    assert all(f"{key}: rank {comm.size - 1} has float16" in message for message in messages), messages


@pytest.mark.parametrize("key", ["numel", "dtype", "slots", "num_buffers"])
def test_ranks_that_disagree_are_told_on_every_rank(comm: Any, kind: Kind, key: str) -> None:
    mine = {"numel": 10, "dtype": "float32", "slots": 4, "num_buffers": 0}
    if comm.rank == comm.size - 1:
        mine[key] = {"numel": 11, "dtype": "float64", "slots": 5, "num_buffers": 1}[key]
    message = ""
    try:
        kind.open(comm, **mine)
    except UserError as error:
        message = str(error)
    messages = comm.allgather(message)
    assert all(f"{key}: rank {comm.size - 1} has" in message for message in messages), messages


def test_ranks_that_open_another_transport_are_told_on_every_rank(comm: Any) -> None:
    message = ""
    try:
        (Kind("two_sided") if comm.rank == 0 else RMA).open(comm, 10)
    except UserError as error:
        message = str(error)
    assert all("transport.name: rank 1 has rma" in message for message in comm.allgather(message))


def test_bad_arguments_are_refused_on_every_rank(comm: Any, kind: Kind) -> None:
    message = ""
    try:
        kind.open(comm, 10, slots=2)
    except UserError as error:
        message = str(error)
    assert all("transport.slots=2" in message for message in comm.allgather(message))


def test_one_rank_is_not_enough(comm: Any, kind: Kind) -> None:
    from mpi4py import MPI

    with pytest.raises(UserError, match="two or more ranks"):
        kind.open(MPI.COMM_SELF, 10)
