"""The program of one loader process: ``python -m hydssp.data.loader_process``, started by ``hydssp.data.loader``.

One job: make parts of batches and put them into shared memory, as told through a socket. Imports what the data set
needs and nothing else: no MPI, not the rank's main module, and for arrays no torch. It ends when the rank's end of
the socket is closed, at once and whatever it is doing, so that it cannot outlive the rank.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from hydssp.data import shared_pickle
from hydssp.errors import TrainingError


def main(arguments: list[str]) -> None:
    """Serve one rank.

    Args:
        arguments: File descriptors: of the socket, of the memory with the data set, of the slots for results.
    """
    channel_descriptor, memory, *slots = map(int, arguments)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the rank decides when to end
    threading.Thread(target=_end_with_rank, args=(channel_descriptor,), daemon=True).start()
    # Either this or the watching thread sees first that the rank is gone; nobody wants a traceback of it.
    with contextlib.suppress(EOFError, ConnectionError):
        _serve(Connection(channel_descriptor), memory, slots)


def _serve(channel: Connection, memory: int, slots: list[int]) -> None:
    writers = [_Slot(descriptor) for descriptor in slots]
    path, offset, size = channel.recv()
    sys.path[:] = path  # modules of the user's are found where the rank finds them
    try:
        samples, order = shared_pickle.load(memory, offset, size)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
    except Exception as error:
        channel.send((False, *_describe(error)))
        return
    channel.send((True,))
    while True:
        number, slot, epoch, start, count = channel.recv()
        answer: tuple[Any, ...]
        try:
            indices = order.indices(epoch, start, count)
            answer = True, *writers[slot].write(samples.gather(indices, epoch))
        except Exception as error:
            answer = False, *_describe(error)
        channel.send((number, *answer))


class _Slot:
    """Memory for one result; grows as needed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._content: mmap.mmap | None = None

    def write(self, results: tuple[Any, ...]) -> tuple[int, list[tuple[np.dtype, tuple[int, ...], int]]]:
        """Write arrays; returns the size of the memory, and dtype, shape and offset of each."""
        arrays = [np.asarray(result) for result in results]
        layout, end = [], 0
        for array in arrays:
            if array.dtype.hasobject:
                raise TypeError(
                    f"a batch of {array.dtype} cannot be handed over; give tensors or arrays of numbers"
                )
            layout.append((array.dtype, array.shape, shared_pickle.aligned(end)))
            end = layout[-1][2] + array.nbytes
        if self._content is None or len(self._content) < end:
            os.ftruncate(self._descriptor, end)
            self._content = mmap.mmap(self._descriptor, end)
        for array, (dtype, shape, offset) in zip(arrays, layout, strict=True):
            np.ndarray(shape, dtype, buffer=self._content, offset=offset)[...] = array
        return len(self._content), layout


def _describe(error: Exception) -> tuple[bytes | None, str]:
    """An exception as it travels: pickled if that goes, and its traceback, or that of the user's that it is about."""
    is_about = error.__cause__ if isinstance(error, TrainingError) and error.__cause__ else error
    text = "".join(traceback.format_exception(is_about))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # some can be pickled, but not back
    except Exception:
        return None, text
    return pickled, text


def _end_with_rank(descriptor: int) -> None:
    poller = select.poll()
    poller.register(
        descriptor, getattr(select, "POLLRDHUP", 0)
    )  # the end of the connection, not its messages
    poller.poll()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
