"""Batches of ranges, made by this rank or ahead of time by loader processes of its own.

One job: give the worker's loop the batch of the range that it was granted, the same with any number of processes. The
processes are fresh interpreters (``hydssp.data.loader_process``), never forks of the rank: a fork of a process that
has started MPI or CUDA is not safe. They import neither MPI nor the rank's main module, share the rank's data set
through memory, and end with the rank however it ends. No MPI, no Hydra; torch only through the batches.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from hydssp.data import shared_pickle
from hydssp.data.order import EpochOrder
from hydssp.errors import TrainingError, UserError

if TYPE_CHECKING:
    from hydssp.data.batches import BatchMaker, Pair

NUM_SLOTS = 2
"""Ranges that may be announced and not yet asked for."""
_END_S = 5.0

_log = logging.getLogger(__name__)

Range = tuple[int, int, int]
"""(epoch, start, count)."""


class _Request(NamedTuple):
    number: int
    slot: int


class LoaderProcessError(Exception):
    """The traceback in a loader process, as the cause of the exception that is raised in the rank."""

    def __str__(self) -> str:
        return f"in a loader process\n{self.args[0]}"


class Loader:
    """The batch of a range: ``loader(epoch, start, count) -> (inputs, targets)``.

    With processes, each makes an even part of every batch, so that they help also when only one range is known ahead.
    They are started by ``start``, or by the first range that is asked for or announced.

    Args:
        batches: Makes the batches.
        order: Turns a range into sample numbers.
        num_processes: ``data.loader_workers``; 0: the rank makes the batches itself when they are asked for.

    Raises:
        UserError: When ``num_processes`` is not an integer from 0, or the data set cannot be handed to another process.
    """

    def __init__(self, batches: BatchMaker, order: EpochOrder, num_processes: int = 0) -> None:
        if type(num_processes) is not int or num_processes < 0:
            raise UserError(f"data.loader_workers is {num_processes!r}; allowed is an integer from 0")
        self.num_processes = num_processes
        self._batches = batches
        self._order = order
        self._announced: dict[Range, _Request] = {}  # oldest first
        self._number = 0
        self._children: list[_Child] = []
        self._memory = -1
        self._is_closed = False
        if num_processes:
            self._memory = shared_pickle.nameless_memory()
            self._end = weakref.finalize(self, _end, self._children, self._memory)
            try:
                self._place = shared_pickle.dump((batches.samples, order), self._memory)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise UserError(
                    f"data.loader_workers={num_processes}: the data set cannot be handed to a loader process"
                    f" ({type(error).__name__}: {error}). Use classes and functions of importable modules, no lambdas"
                    " and no open files, or set data.loader_workers=0"
                ) from error

    def __call__(self, epoch: int, start: int, count: int) -> Pair:
        """Inputs and targets of the samples at positions ``start`` to ``start + count`` of an epoch's order.

        Raises:
            Exception: What making it raised, which for a data set of the user's is a TrainingError; from a loader
                process with the traceback there as its cause.
            TrainingError: When a loader process has ended.
        """
        assert not self._is_closed
        if not self.num_processes or not count:
            return self._batches.batch(self._order.indices(epoch, start, count), epoch)
        wanted = epoch, start, count
        self._announce(wanted)
        request = self._announced.pop(wanted)
        parts = [child.answer(request, self._announced.values()) for child in self._working(start, count)]
        # Joining also copies out of the slot, which is free from here on.
        return self._batches.finish(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def prefetch(self, epoch: int, start: int, count: int) -> None:
        """Announce a range that is likely to be asked for soon; does not wait once the processes are there.

        An announced range that is never asked for does no harm: the oldest is forgotten when there are more than
        ``NUM_SLOTS``. Without loader processes nothing is done.
        """
        assert not self._is_closed
        if self.num_processes and count:
            self._announce((epoch, start, count))

    def close(self) -> None:
        """End the processes; idempotent. The loader cannot be used afterwards."""
        self._is_closed = True
        self._announced.clear()
        if self.num_processes:
            self._end()

    def __enter__(self) -> Loader:
        """The loader itself, to be closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """See ``close``."""
        self.close()

    def start(self) -> None:
        """Start the processes and wait until they have loaded the data set; nothing if they are there already.

        Best done before training begins: an interpreter with torch takes some seconds to start.

        Raises:
            UserError: When a process cannot load the data set.
            TrainingError: When one ends.
        """
        assert not self._is_closed
        if self._children or not self.num_processes:
            return
        self._warn_of_few_cores()
        for number in range(self.num_processes):
            self._children.append(_Child(number, self._memory, self._place))
        for child in self._children:
            child.wait_until_ready()

    def _warn_of_few_cores(self) -> None:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if num_cores < self.num_processes + 1:
            _log.warning(
                "data.loader_workers=%d, but this rank may use only %d core(s), so that loading and computing take time"
                " from each other; bind each rank to at least %d cores, or set fewer loader workers",
                self.num_processes,
                num_cores,
                self.num_processes + 1,
            )

    def _announce(self, wanted: Range) -> None:
        self.start()
        if wanted in self._announced:
            return
        if len(self._announced) == NUM_SLOTS:
            del self._announced[next(iter(self._announced))]
        # The slot of a forgotten request can be used at once: a process does one after the other, and what it writes
        # for the forgotten one is never read.
        taken = {request.slot for request in self._announced.values()}
        slot = next(slot for slot in range(NUM_SLOTS) if slot not in taken)
        self._number += 1
        self._announced[wanted] = _Request(self._number, slot)
        epoch, start, count = wanted
        ends = [start + count * n // self.num_processes for n in range(self.num_processes + 1)]
        for child, begin, end in zip(self._children, ends[:-1], ends[1:], strict=True):
            if begin < end:
                child.ask(self._number, slot, (epoch, begin, end - begin))

    def _working(self, start: int, count: int) -> Iterator[_Child]:
        """The processes that have a part of such a range."""
        for number, child in enumerate(self._children):
            if count * number // self.num_processes < count * (number + 1) // self.num_processes:
                yield child


class _Child:
    """One loader process as the rank sees it."""

    def __init__(self, number: int, memory: int, place: tuple[int, int]) -> None:
        self._name = f"loader process {number}"
        self._slots = [shared_pickle.nameless_memory() for _ in range(NUM_SLOTS)]
        self._maps: list[mmap.mmap | None] = [None] * NUM_SLOTS
        self._answers: dict[int, tuple[Any, ...]] = {}
        ours, theirs = socket.socketpair()
        descriptors = [theirs.fileno(), memory, *self._slots]
        # One thread each: the cores belong to the ranks.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hydssp.data.loader_process", *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env={**os.environ, **threads},
        )
        theirs.close()
        self._channel = Connection(ours.detach())
        self._send((sys.path, *place))

    def wait_until_ready(self) -> None:
        """Wait until it has loaded the data set."""
        is_right, *failure = self._receive()
        if not is_right:
            text = failure[-1]
            raise UserError(
                f"data.loader_workers: {self._name} cannot load the data set ({text.strip().splitlines()[-1]}); its"
                " classes must be in modules that can be imported, and not in the program that is run. Or set"
                " data.loader_workers=0"
            ) from LoaderProcessError(text)

    def ask(self, number: int, slot: int, part: Range) -> None:
        """Have it make a part of a batch."""
        self._send((number, slot, *part))

    def answer(self, request: _Request, awaited: Any) -> tuple[np.ndarray, ...]:
        """Wait for the answer to ``request``: views of the slot.

        Args:
            request: Asked before.
            awaited: Other requests whose answers are kept.
        """
        kept = {request.number, *(other.number for other in awaited)}
        self._answers = {number: answer for number, answer in self._answers.items() if number in kept}
        while request.number not in self._answers:
            number, *answer = self._receive()
            if number in kept:
                self._answers[number] = tuple(answer)
        is_right, *answer = self._answers.pop(request.number)
        if not is_right:
            _raise_original(*answer)
        size, layout = answer
        content = self._maps[request.slot]
        if content is None or len(content) < size:
            content = self._maps[request.slot] = mmap.mmap(
                self._slots[request.slot], size, prot=mmap.PROT_READ
            )
        return tuple(
            np.ndarray(shape, dtype, buffer=content, offset=offset) for dtype, shape, offset in layout
        )

    def close(self) -> None:
        """It ends when its channel does."""
        self._channel.close()
        for slot in self._slots:
            os.close(slot)

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._channel.send(message)
        except OSError:
            self._raise_ended()

    def _receive(self) -> tuple[Any, ...]:
        try:
            message: tuple[Any, ...] = self._channel.recv()
        except (EOFError, OSError):
            self._raise_ended()
        return message

    def _raise_ended(self) -> NoReturn:
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        why = "; the node may be short of memory" if code == -signal.SIGKILL else ""
        raise TrainingError(
            f"{self._name} of this rank (process {self.process.pid}) {how}{why}; what it had to say stands above."
            " data.loader_workers=0 loads in the rank itself"
        )


def _raise_original(pickled: bytes | None, text: str) -> NoReturn:
    """Raise in the rank what was raised in the loader process."""
    error: Any = None
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
        except Exception:
            error = None
    if not isinstance(error, Exception):
        error = RuntimeError("making a batch failed")
    raise error from LoaderProcessError(text)


def _end(children: list[_Child], memory: int) -> None:
    """End the processes and give everything back."""
    for child in children:
        child.close()
    for child in children:
        try:
            child.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
    children.clear()
    os.close(memory)
