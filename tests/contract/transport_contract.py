"""What every transport has to do: one suite of cases, for in-process ends and for real ranks.

A case is a pair of scripts: generator functions that get an end of the transport, yield where they would
wait, and return what they saw. A driver (one per transport, in the test modules) either interleaves all
scripts in one process or runs one per rank; then ``check`` judges what was seen, with the same values on
every rank. Scripts agree on the order of things by words, which travel outside the transport.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

import numpy as np

from hydssp.transport.messages import Clock, Grant, Pushed
from hydssp.transport.protocol import ServerTransport, WorkerTransport

Script = Generator[None, None, Any]


class Stage(Protocol):
    """Words from script to script, and what the driver knows of its transport."""

    can_overtake: bool
    """A pull begins again when the ring goes round under it; False where it gets a version to itself."""

    def tell(self, word: str) -> None:
        """Say ``word`` to all."""

    def heard(self, word: str) -> bool:
        """Whether anybody has said ``word``."""


class Case:
    """One case. Its sizes are the transport's arguments."""

    numel = 1000
    dtype = "float32"
    slots = 4
    chunk_bytes = 1 << 30
    num_buffers = 0
    pull_dtype: str | None = None
    push_dtype: str | None = None
    pause_s = 100e-6
    """Real ranks pause for this long where a script yields."""
    limit_s = 30.0
    """A script that takes longer has failed; below the test's time-out, so that it can be told on which rank."""

    def __repr__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({options})"

    def server(self, end: ServerTransport, stage: Stage) -> Script:
        raise NotImplementedError

    def worker(self, end: WorkerTransport, stage: Stage) -> Script:
        raise NotImplementedError

    def check(self, server: Any, workers: list[Any]) -> None:
        raise NotImplementedError


# --- what scripts have in common ---


def publish(end: ServerTransport, version: int, value: float | None = None) -> None:
    """Publish a vector filled with ``value``, by default its number."""
    end.begin_publish(version)[:] = version if value is None else value
    end.end_publish()


def grant_all(end: ServerTransport, grant: Grant) -> None:
    for worker in range(end.num_workers):
        end.grant(worker, grant)


def stop_all(end: ServerTransport) -> None:
    grant_all(end, Grant(iteration=0, version=0, stop=True))


def collect(end: ServerTransport, count: int) -> Generator[None, None, list[Pushed]]:
    """The next ``count`` pushes."""
    pushes: list[Pushed] = []
    while len(pushes) < count:
        pushes += end.receive()
        yield
    return pushes


def wait_for_word(end: ServerTransport | WorkerTransport, stage: Stage, word: str) -> Script:
    while not stage.heard(word):
        if hasattr(end, "progress"):
            end.progress()
        yield


def wait_until(end: ServerTransport | WorkerTransport, at: float) -> Script:
    while end.now() < at:
        if hasattr(end, "progress"):
            end.progress()
        yield


def wait_for_grant(end: WorkerTransport) -> Generator[None, None, Grant]:
    while (grant := end.poll_grant()) is None:
        yield
    return grant


def is_refused(error: type[Exception], call: Callable[..., Any], *args: Any) -> bool:
    try:
        call(*args)
    except error:
        return True
    return False


def calls_that_survive_close(end: ServerTransport | WorkerTransport) -> list[str]:
    """Names of the calls on a closed end that did not raise; empty is right."""
    if hasattr(end, "receive"):
        calls: dict[str, tuple[Any, ...]] = {
            "progress": (),
            "begin_publish": (0,),
            "end_publish": (),
            "gradient": (0,),
            "buffers": (0,),
            "receive": (),
            "grant": (0, Grant(0, 0)),
        }
    else:
        calls = {
            "poll_grant": (),
            "pull": (np.zeros(end.numel, np.float32), 0),
            "push": (None, Clock(0, 0, samples=0)),
        }
    return [name for name, args in calls.items() if not is_refused(RuntimeError, getattr(end, name), *args)]


class Read(NamedTuple):
    version: int
    retries: int
    values: list[float]
    """Distinct elements of the vector: one if it is whole."""


def read_result(out: np.ndarray, version: int, retries: int) -> Read:
    return Read(version, retries, np.unique(out).tolist())


def assert_whole(reads: list[Read]) -> None:
    torn = [read for read in reads if read.values != [float(read.version)]]
    assert not torn, f"{len(torn)} of {len(reads)} reads are not the version they claim to be, e.g. {torn[0]}"


# --- pulls ---


class WholeVersionsUnderOverwriting(Case):
    """Readers against a writer that goes round the ring meanwhile. A slow one is overtaken by every read."""

    numel = 1 << 18
    num_versions = 120
    chunk_bytes = 1 << 16

    def __init__(self, is_slow: bool) -> None:
        self.is_slow = is_slow

    def server(self, end, stage):
        publish(end, 0)
        grant_all(end, Grant(iteration=0, version=0, count=1))
        yield from wait_for_word(end, stage, "reading")
        half = self.numel // 2
        for version in range(1, self.num_versions):
            weights = end.begin_publish(version)
            weights[:half] = version
            yield
            weights[half:] = version
            end.end_publish()
            end.progress()
            if version % 8 == 0:  # now and then a reader should get through
                yield from wait_until(end, end.now() + 0.005)
        stage.tell("written")
        yield from collect(end, end.num_workers)
        stop_all(end)

    def worker(self, end, stage):
        grant = yield from wait_for_grant(end)
        stage.tell("reading")
        out = np.empty(self.numel, self.dtype)
        reads = []
        version = grant.version
        is_last = False
        while not is_last:
            is_last = stage.heard("written")
            # The last read asks for a version that this worker was never told of.
            wanted = self.num_versions - 1 if is_last else version
            if self.is_slow:
                version, retries = yield from end.pull_steps(out, wanted)
            else:
                version, retries = end.pull(out, wanted)
                yield
            reads.append(read_result(out, version, retries))
        end.push(None, Clock(0, version, samples=0))
        assert (yield from wait_for_grant(end)).stop
        return reads, stage.can_overtake

    def check(self, server, workers):
        for reads, _ in workers:
            assert_whole(reads)
            versions = [read.version for read in reads]
            assert versions == sorted(versions)
            assert versions[-1] == self.num_versions - 1
            assert len(reads) > 1
        num_retries = sum(read.retries for reads, _ in workers for read in reads)
        if not workers[0][1]:
            assert num_retries == 0
        elif self.is_slow:
            assert num_retries > 0


class Overwritten(Case):
    """Worker 0 has read some pieces of a version when its slot is overwritten, in half or completely."""

    numel = 4000
    chunk_bytes = 4000
    num_pieces = 4

    def __init__(self, pieces_read: int, is_complete: bool) -> None:
        self.pieces_read = pieces_read
        self.is_complete = is_complete

    def server(self, end, stage):
        publish(end, 0)
        end.grant(0, Grant(iteration=0, version=0, count=1))
        yield from wait_for_word(end, stage, "paused")
        for version in range(1, self.slots):
            publish(end, version)
        weights = end.begin_publish(self.slots)  # the slot of version 0
        weights[: self.numel // 2] = self.slots
        if self.is_complete:
            weights[:] = self.slots
            end.end_publish()
        stage.tell("overwritten")
        yield from wait_for_word(end, stage, "read")
        if not self.is_complete:
            weights[:] = self.slots
            end.end_publish()
        (push,) = yield from collect(end, 1)
        stop_all(end)
        return push

    def worker(self, end, stage):
        if end.worker > 0:
            assert (yield from wait_for_grant(end)).stop
            return None
        grant = yield from wait_for_grant(end)
        out = np.empty(self.numel, self.dtype)
        steps = end.pull_steps(out, grant.version)
        for _ in range(self.pieces_read):
            next(steps)
        stage.tell("paused")
        yield from wait_for_word(end, stage, "overwritten")
        version, retries = yield from steps
        stage.tell("read")
        end.push(None, Clock(0, version, samples=0, pull_retries=retries))
        assert (yield from wait_for_grant(end)).stop
        return read_result(out, version, retries), stage.can_overtake

    def check(self, server, workers):
        read, can_overtake = workers[0]
        newest = self.slots if self.is_complete else self.slots - 1
        version, retries = (newest, 1) if can_overtake else (0, 0)
        assert read == Read(version, retries, [float(version)])
        assert (server.clock.version, server.clock.pull_retries) == (version, retries)


class PullBeforePublish(Case):
    """Nothing to read yet is an error, not an endless wait."""

    def server(self, end, stage):
        early = is_refused(RuntimeError, end.grant, 0, Grant(0, version=0))
        for worker in range(end.num_workers):
            yield from wait_for_word(end, stage, f"tried {worker}")
        publish(end, 0)
        grant_all(end, Grant(0, version=0))
        yield from collect(end, end.num_workers)
        stop_all(end)
        return early

    def worker(self, end, stage):
        out = np.zeros(self.numel, self.dtype)
        refused = is_refused(RuntimeError, end.pull, out, 0)
        stage.tell(f"tried {end.worker}")
        grant = yield from wait_for_grant(end)
        read = end.pull(out, grant.version)
        end.push(None, Clock(0, grant.version, samples=0))
        assert (yield from wait_for_grant(end)).stop
        return refused, read

    def check(self, server, workers):
        assert server, "granted a version that was not published"
        assert workers == [(True, (0, 0))] * len(workers)


# --- pushes, grants, messages ---


class PushedOnce(Case):
    """Every push arrives once, with its gradient bit for bit, which stays until the next grant."""

    numel = 5000
    num_iterations = 4

    def __init__(self, dtype: str, chunk_bytes: int) -> None:
        self.dtype = dtype
        self.chunk_bytes = chunk_bytes

    def pattern(self, worker: int, iteration: int) -> np.ndarray:
        rng = np.random.default_rng([worker, iteration])
        return rng.standard_normal(self.numel).astype(self.dtype)

    def server(self, end, stage):
        publish(end, 0)
        seen = []
        for iteration in range(self.num_iterations):
            grant_all(end, Grant(iteration, version=0, count=1))
            pushes = yield from collect(end, end.num_workers)
            assert end.receive() == []
            for push in pushes:
                gradient = end.gradient(push.worker)
                expected = self.pattern(push.worker, iteration)
                is_intact = gradient.dtype == expected.dtype and np.array_equal(gradient, expected)
                seen.append((iteration, push.worker, push.clock.iteration, push.clock.loss, is_intact))
        stop_all(end)
        yield from wait_until(end, end.now() + 0.01)
        assert end.receive() == []
        return sorted(seen)

    def worker(self, end, stage):
        buffer = np.empty(self.numel, self.dtype)
        while not (grant := (yield from wait_for_grant(end))).stop:
            buffer[:] = self.pattern(end.worker, grant.iteration)
            end.push(buffer, Clock(grant.iteration, grant.version, samples=1, loss=end.worker + 0.5))
            buffer[:] = np.nan  # reusable on return
        return None

    def check(self, server, workers):
        assert server == [
            (iteration, worker, iteration, worker + 0.5, True)
            for iteration in range(self.num_iterations)
            for worker in range(len(workers))
        ]


class Formats(Case):
    """Weights and gradients that travel as other types than the weights' own come through bit for bit."""

    num_iterations = 3

    def __init__(self, pull_dtype: str, push_dtype: str, chunk_bytes: int = 1 << 30) -> None:
        self.pull_dtype = pull_dtype
        self.push_dtype = push_dtype
        self.chunk_bytes = chunk_bytes

    def pattern(self, dtype: str, *seed: int) -> np.ndarray:
        """Any bits, those of nan and subnormal numbers included."""
        num_bytes = self.numel * np.dtype(dtype).itemsize
        return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).view(dtype)

    def server(self, end, stage):
        are_right = []
        for version in range(self.num_iterations):
            weights = end.begin_publish(version)
            weights[:] = self.pattern(self.pull_dtype, version)
            end.end_publish()
            grant_all(end, Grant(version, version, count=1))
            for push in (yield from collect(end, end.num_workers)):
                gradient = end.gradient(push.worker)
                expected = self.pattern(self.push_dtype, push.worker, version)
                are_right.append(
                    gradient.dtype == expected.dtype and gradient.tobytes() == expected.tobytes()
                )
        stop_all(end)
        return are_right

    def worker(self, end, stage):
        out = np.empty(self.numel, self.pull_dtype)
        seen = []
        while not (grant := (yield from wait_for_grant(end))).stop:
            version, _ = end.pull(out, grant.version)
            seen.append(out.tobytes() == self.pattern(self.pull_dtype, version).tobytes())
            clock = Clock(grant.iteration, version, samples=1)
            for wrong in ("float64", "int16"):
                seen.append(is_refused(ValueError, end.push, np.zeros(self.numel, wrong), clock))
                seen.append(is_refused(ValueError, end.pull, np.zeros(self.numel, wrong), version))
            gradient = self.pattern(self.push_dtype, end.worker, grant.iteration)
            end.push(gradient, clock)
            gradient.view(np.uint8)[:] = 0  # reusable on return
        return seen

    def check(self, server, workers):
        assert server == [True] * self.num_iterations * len(workers)
        assert workers == [[True] * 5 * self.num_iterations] * len(workers)


class GrantWakesOne(Case):
    """A grant reaches the worker it is for, with all its numbers, and nobody else."""

    def server(self, end, stage):
        publish(end, 0)
        order = []
        for iteration in range(3):
            for worker in reversed(range(end.num_workers)):
                end.grant(worker, self.expected(worker, iteration))
                order += [push.worker for push in (yield from collect(end, 1))]
                yield from wait_until(end, end.now() + 0.002)
                assert end.receive() == []
        stop_all(end)
        return order

    def worker(self, end, stage):
        grants = []
        while not (grant := (yield from wait_for_grant(end))).stop:
            grants.append(grant)
            end.push(None, Clock(grant.iteration, grant.version, samples=0))
        return grants

    def expected(self, worker: int, iteration: int) -> Grant:
        return Grant(iteration, version=0, epoch=7, start=100 * worker + iteration, count=32)

    def check(self, server, workers):
        assert server == list(reversed(range(len(workers)))) * 3
        for worker, grants in enumerate(workers):
            assert grants == [self.expected(worker, iteration) for iteration in range(3)]


class Stop(Case):
    """A stop is the last word: it is seen once, and nothing may be pushed after it."""

    def server(self, end, stage):
        publish(end, 0)
        grant_all(end, Grant(0, version=0))
        yield from collect(end, end.num_workers)
        stop_all(end)
        again = is_refused(RuntimeError, end.grant, 0, Grant(1, version=0))
        yield from wait_until(end, end.now() + 0.01)
        return again, end.receive()

    def worker(self, end, stage):
        grant = yield from wait_for_grant(end)
        end.push(None, Clock(grant.iteration, grant.version, samples=0))
        stop = yield from wait_for_grant(end)
        refused = is_refused(RuntimeError, end.push, None, Clock(stop.iteration, stop.version, samples=0))
        yield from wait_until(end, end.now() + 0.005)
        return stop.stop, refused, end.poll_grant()

    def check(self, server, workers):
        assert server == (True, [])
        assert workers == [(True, True, None)] * len(workers)


class EmptyPush(Case):
    """A push without a gradient brings its message and leaves the slot as it was."""

    def server(self, end, stage):
        publish(end, 0)
        clocks, values = [], []
        for iteration in range(2):
            grant_all(end, Grant(iteration, version=0, count=1 - iteration))
            pushes = yield from collect(end, end.num_workers)
            clocks.append([push.clock for push in pushes])
            values.append([np.unique(end.gradient(worker)).tolist() for worker in range(end.num_workers)])
        stop_all(end)
        return clocks, values

    def worker(self, end, stage):
        while not (grant := (yield from wait_for_grant(end))).stop:
            gradient = np.full(self.numel, 2.5, self.dtype) if grant.count else None
            end.push(gradient, Clock(grant.iteration, grant.version, samples=grant.count, loss=0.0))
        return None

    def check(self, server, workers):
        clocks, values = server
        assert [[clock.samples for clock in row] for row in clocks] == [
            [1] * len(workers),
            [0] * len(workers),
        ]
        assert values == [[[2.5]] * len(workers)] * 2


class Buffers(Case):
    """Buffers arrive exactly with their push, stay until the next grant, and None leaves them as they were."""

    num_iterations = 4

    def __init__(self, num_buffers: int, chunk_bytes: int) -> None:
        self.num_buffers = num_buffers
        self.chunk_bytes = chunk_bytes

    def pattern(self, worker: int, iteration: int) -> np.ndarray:
        """Any float32 number and the largest counters must come through unchanged."""
        values = np.random.default_rng([worker, iteration]).standard_normal(self.num_buffers)
        values = values.astype(np.float32).astype(np.float64)
        values[:2] = 2**53 - 1 - worker, 1 + np.finfo(np.float32).eps
        return values

    def server(self, end, stage):
        publish(end, 0)
        at_first = [end.buffers(worker).tolist() for worker in range(end.num_workers)]
        are_right = []
        for iteration in range(self.num_iterations):
            is_empty = iteration == self.num_iterations - 1
            grant_all(end, Grant(iteration, version=0, count=1 - is_empty))
            for push in (yield from collect(end, end.num_workers)):
                buffers = end.buffers(push.worker)
                expected = self.pattern(push.worker, iteration - is_empty)
                is_whole = np.unique(end.gradient(push.worker)).tolist() == [iteration - is_empty]
                are_right.append(
                    buffers.dtype == np.float64 and np.array_equal(buffers, expected) and is_whole
                )
        stop_all(end)
        return at_first, are_right

    def worker(self, end, stage):
        assert end.num_buffers == self.num_buffers
        gradient = np.empty(self.numel, self.dtype)
        buffers = np.empty(self.num_buffers)
        refused = []

        def refuses(gradient, buffers):
            return is_refused(ValueError, end.push, gradient, Clock(grant.iteration, 0, samples=1), buffers)

        while not (grant := (yield from wait_for_grant(end))).stop:
            if not grant.count:
                end.push(None, Clock(grant.iteration, 0, samples=0))
                continue
            gradient[:] = grant.iteration
            buffers[:] = self.pattern(end.worker, grant.iteration)
            refused += [
                refuses(gradient, None),
                refuses(gradient, buffers[1:]),
                refuses(gradient, buffers.astype(np.float32)),
                refuses(gradient, np.zeros(2 * self.num_buffers)[::2]),
            ]
            end.push(gradient, Clock(grant.iteration, 0, samples=1), buffers)
            gradient[:] = np.nan
            buffers[:] = np.nan  # reusable on return
        return refused

    def check(self, server, workers):
        at_first, are_right = server
        assert at_first == [[0.0] * self.num_buffers] * len(workers)
        assert are_right == [True] * self.num_iterations * len(workers)
        for refused in workers:
            assert refused == [True] * len(refused)


class NoBuffers(Case):
    """A model without buffers needs none; a vector of none is as good as None, one of some is refused."""

    def server(self, end, stage):
        publish(end, 0)
        grant_all(end, Grant(0, version=0, count=1))
        yield from collect(end, end.num_workers)
        sizes = [end.num_buffers, *(end.buffers(worker).size for worker in range(end.num_workers))]
        stop_all(end)
        return sizes

    def worker(self, end, stage):
        yield from wait_for_grant(end)
        gradient, clock = np.zeros(self.numel, self.dtype), Clock(0, 0, samples=1)
        refused = is_refused(ValueError, end.push, gradient, clock, np.zeros(1))
        end.push(gradient, clock, np.zeros(0))
        assert (yield from wait_for_grant(end)).stop
        return refused

    def check(self, server, workers):
        assert server == [0] * (1 + len(workers))
        assert workers == [True] * len(workers)


class Refusals(Case):
    """Calls against the rules raise and do no harm."""

    def server(self, end, stage):
        wrong_order = [
            is_refused(RuntimeError, end.end_publish),
            is_refused(RuntimeError, end.begin_publish, 1),
            is_refused(RuntimeError, end.begin_publish, -1),
        ]
        publish(end, 0)
        end.begin_publish(1)
        wrong_order += [
            is_refused(RuntimeError, end.begin_publish, 2),
            is_refused(RuntimeError, end.grant, 0, Grant(0, version=1)),
        ]
        end.end_publish()
        for worker in range(end.num_workers):
            yield from wait_for_word(end, stage, f"tried {worker}")
        assert end.receive() == []
        grant_all(end, Grant(0, version=0, count=1))
        second_grant = is_refused(RuntimeError, end.grant, 0, Grant(1, version=0))
        pushes = yield from collect(end, end.num_workers)
        stop_all(end)
        return wrong_order, second_grant, [push.clock.iteration for push in pushes]

    def worker(self, end, stage):
        def push(gradient, iteration=0, samples=1):
            return is_refused((RuntimeError, ValueError), end.push, gradient, Clock(iteration, 0, samples))

        right = np.zeros(self.numel, self.dtype)
        refused = {"without a grant": push(right)}
        stage.tell(f"tried {end.worker}")
        yield from wait_for_grant(end)
        refused |= {
            "another iteration": push(right, iteration=1),
            "no gradient": push(None),
            "gradient of nothing": push(right, samples=0),
            "too long": push(np.zeros(self.numel + 1, self.dtype)),
            "wrong dtype": push(np.zeros(self.numel, np.float64)),
            "not contiguous": push(np.zeros(2 * self.numel, self.dtype)[::2]),
            "pull into wrong dtype": is_refused(ValueError, end.pull, np.zeros(self.numel, np.float64), 0),
            "pull of -1": is_refused(ValueError, end.pull, right, -1),
        }
        end.push(right, Clock(0, 0, samples=1))
        refused["second push"] = push(right)
        assert (yield from wait_for_grant(end)).stop
        return refused

    def check(self, server, workers):
        wrong_order, second_grant, iterations = server
        assert all(wrong_order), wrong_order
        assert second_grant
        assert iterations == [0] * len(workers)
        for refused in workers:
            assert all(refused.values()), [name for name, is_so in refused.items() if not is_so]


class Times(Case):
    """A worker's times arrive on the server's clock, in the order in which things happened."""

    num_iterations = 5
    compute_s = 0.02

    def server(self, end, stage):
        publish(end, 0)
        spans = [[] for _ in range(end.num_workers)]
        for iteration in range(self.num_iterations):
            sent_at = end.now()
            grant_all(end, Grant(iteration, version=0))
            for push in (yield from collect(end, end.num_workers)):
                spans[push.worker].append((sent_at, push.granted_at, push.pushed_at, push.received_at))
                assert 0.0 <= push.clock.push_s < 1.0  # measured, not what the worker said
        stop_all(end)
        return spans

    def worker(self, end, stage):
        spans = []
        while not (grant := (yield from wait_for_grant(end))).stop:
            granted_at = end.now()
            yield from wait_until(end, granted_at + self.compute_s)
            spans.append(end.now() - granted_at)
            end.push(None, Clock(grant.iteration, grant.version, samples=0, push_s=99.0))
        return spans

    def check(self, server, workers):
        for mapped, measured in zip(server, workers, strict=True):
            flat = [at for times in mapped for at in times]
            assert len(mapped) == self.num_iterations
            assert flat == sorted(flat)
            for (_, granted_at, pushed_at, _), span in zip(mapped, measured, strict=True):
                assert abs((pushed_at - granted_at) - span) < 0.01


class WorkerOrder(Case):
    """Messages that arrived together are handed out in worker order, however they came."""

    def server(self, end, stage):
        publish(end, 0)
        received = []
        for iteration in range(3):
            grant_all(end, Grant(iteration, version=0))
            for worker in reversed(range(end.num_workers)):
                stage.tell(f"turn {iteration} {worker}")
                yield from wait_for_word(end, stage, f"pushed {iteration} {worker}")
            yield from wait_until(end, end.now() + 0.05)  # until the last message is in, too
            received.append([push.worker for push in end.receive()])
        stop_all(end)
        return received

    def worker(self, end, stage):
        while not (grant := (yield from wait_for_grant(end))).stop:
            yield from wait_for_word(end, stage, f"turn {grant.iteration} {end.worker}")
            end.push(None, Clock(grant.iteration, grant.version, samples=0))
            stage.tell(f"pushed {grant.iteration} {end.worker}")
        return None

    def check(self, server, workers):
        assert server == [list(range(len(workers)))] * 3


class LargeVectorsWhileServerPolls(Case):
    """40 MB each way, while the server only looks in every millisecond."""

    numel = 10_000_000
    slots = 3
    pause_s = 1e-3

    def server(self, end, stage):
        publish(end, 0, value=0.0)
        end.grant(0, Grant(0, version=0, count=1))
        yield from collect(end, 1)
        values = np.unique(end.gradient(0)).tolist()
        stop_all(end)
        return values

    def worker(self, end, stage):
        grant = yield from wait_for_grant(end)
        if grant.stop:
            return None
        out = np.ones(self.numel, self.dtype)
        began_at = end.now()
        end.pull(out, grant.version)
        is_whole = not out.any()
        out[:] = 3.0
        end.push(out, Clock(0, 0, samples=1))
        took_s = end.now() - began_at
        assert (yield from wait_for_grant(end)).stop
        return is_whole, took_s

    def check(self, server, workers):
        assert server == [3.0]
        is_whole, took_s = workers[0]
        assert is_whole
        assert took_s < 5.0  # a transport that moves data only when the server looks in takes far longer


class Soak(Case):
    """Asynchronous traffic with random delays: every read whole, every gradient intact and counted once."""

    numel = 20_000
    dtype = "float64"
    slots = 3
    chunk_bytes = 32_000
    duration_s = 2.0

    def server(self, end, stage):
        rng = random.Random(0)
        publish(end, 0)
        grant_all(end, Grant(0, version=0, count=1))
        version = 0
        counts = [0] * end.num_workers
        problems = []
        num_active = end.num_workers
        while num_active:
            pushes = end.receive()
            for push in pushes:
                worker = push.worker
                expected = 1e6 * worker + push.clock.iteration
                values = np.unique(end.gradient(worker)).tolist()
                if values != [expected] or push.clock.iteration != counts[worker]:
                    problems.append((worker, counts[worker], push.clock, values))
                if not 0 <= push.clock.version <= version:
                    problems.append((worker, version, push.clock))
                counts[worker] += 1
                version += 1
                weights = end.begin_publish(version)
                for start in range(0, self.numel, 5000):
                    weights[start : start + 5000] = version
                    if rng.random() < 0.3:
                        yield
                end.end_publish()
                is_over = end.now() > self.duration_s
                end.grant(worker, Grant(counts[worker], version, count=1, stop=is_over))
                num_active -= is_over
            yield
        return counts, problems

    def worker(self, end, stage):
        rng = random.Random(end.worker)
        out = np.empty(self.numel, self.dtype)
        count, reads = 0, []
        while not (grant := (yield from wait_for_grant(end))).stop:
            version, retries = yield from end.pull_steps(out, grant.version)
            reads.append(read_result(out, version, retries))
            yield from wait_until(end, end.now() + rng.choice([0.0, 0.0005, 0.002, 0.01]) * rng.random())
            out[:] = 1e6 * end.worker + grant.iteration
            end.push(out, Clock(grant.iteration, version, samples=1, pull_retries=retries))
            count += 1
        return count, [read for read in reads if read.values != [float(read.version)]]

    def check(self, server, workers):
        counts, problems = server
        assert problems == []
        assert counts == [count for count, _ in workers]
        assert all(count > 10 for count in counts), counts
        for _, torn in workers:
            assert_whole(torn)


CASES: list[Case] = [
    WholeVersionsUnderOverwriting(is_slow=True),
    WholeVersionsUnderOverwriting(is_slow=False),
    Overwritten(pieces_read=1, is_complete=False),
    Overwritten(pieces_read=4, is_complete=False),
    Overwritten(pieces_read=1, is_complete=True),
    Overwritten(pieces_read=4, is_complete=True),
    PullBeforePublish(),
    PushedOnce(dtype="float32", chunk_bytes=1 << 30),
    PushedOnce(dtype="float64", chunk_bytes=1 << 30),
    PushedOnce(dtype="float64", chunk_bytes=4096),
    Formats("uint16", "float32"),
    Formats("float32", "uint16"),
    Formats("float16", "uint16", chunk_bytes=64),
    GrantWakesOne(),
    Stop(),
    EmptyPush(),
    Buffers(num_buffers=7, chunk_bytes=1 << 30),
    Buffers(num_buffers=1000, chunk_bytes=64),
    NoBuffers(),
    Refusals(),
    Times(),
    WorkerOrder(),
    LargeVectorsWhileServerPolls(),
    Soak(),
]
