"""The layout of the server's memory, and the ring of published versions: how to write and to read it.

Numpy only; imports no MPI. How bytes get from one process to another is the business of the transports.

**Why a read is never torn.** Version v lives in slot v % slots. The writer (one, the server) does, with a
memory barrier (``sync``) between any two lines::

    tag[slot] = -1
    store the data
    tag[slot] = v
    latest = v

and the reader: read the data, complete, read the tag, complete; accept if the tag is v. Versions only grow,
so a slot's tag is v during one single interval: it starts after the last store of v and ends before the first
store of v + slots. If v was already published when the read of the data began, and the tag is still v after
it ended, the whole read lies within that interval and saw the bytes of v alone. No look at the tag *before*
the read is needed, because the reader only tries versions that it knows to be published: the grant names one
(the server refuses to grant any other), and ``latest`` is written after the tag. When the slot was
overwritten in the meantime, even completely, the tag has gone from v for ever: the reader reads ``latest``
and begins again. Nobody waits for anybody. (Should a transport read the eight bytes of a tag one by one: a
mixture of -1 and v + slots is never v, because bytes of -1 can only make a number negative or larger.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hydssp.errors import UserError

ALIGNMENT_BYTES = 64
WORD_BYTES = 8
NOT_PUBLISHED = -1
MIN_SLOTS = 3
DEFAULT_SLOTS = 4
MAX_CHUNK_BYTES = 1 << 30
"""Largest piece of one put or get: some MPI libraries refuse counts above 2**31 - 1."""
MAX_RETRIES = 1000
"""A pull that began again this often will not succeed: the ring is too small for this network."""
DTYPES = ("float32", "float64")
WIRE_DTYPES = (*DTYPES, "float16", "uint16")
"""What may travel; bfloat16, which numpy does not know, as uint16. Transports do not look into it."""
BUFFERS_DTYPE = np.dtype("float64")
"""Buffers travel in it whatever their own type: exact for float32 and for integers below 2**53."""


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class WindowLayout:
    """Byte offsets of the server's memory: tags | latest | ring of weights | gradients | buffers.

    One gradient slot and one buffers slot per worker. Every part begins at a multiple of 64 bytes.
    """

    num_workers: int
    numel: int
    """Elements of the weight vector and of each gradient."""
    dtype: np.dtype
    """float32 or float64."""
    slots: int = DEFAULT_SLOTS
    """Versions that the ring holds, at least 3."""
    num_buffers: int = 0
    """Elements of each buffers slot, float64; 0 for a model without."""
    pull_dtype: np.dtype | None = None
    """Elements of the ring as they travel; None: ``dtype``."""
    push_dtype: np.dtype | None = None
    """The same for the gradient slots."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UserError: When a value is outside what its field says.
        """
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        for name in ("pull_dtype", "push_dtype"):
            given = getattr(self, name)
            object.__setattr__(self, name, self.dtype if given is None else np.dtype(given))
        if self.num_workers < 1:
            raise UserError(
                f"num_workers={self.num_workers}: at least 1 is needed. "
                "Start two or more ranks: one server and its workers."
            )
        if self.numel < 1:
            raise UserError(
                f"numel={self.numel}: at least 1 is needed. Give a model that has parameters to train."
            )
        if self.dtype.name not in DTYPES:
            raise UserError(
                f"dtype={self.dtype.name}: allowed are {', '.join(DTYPES)}. "
                "Convert the model's parameters to one of them."
            )
        for key, dtype in (("wire.pull", self.weights_dtype), ("wire.push", self.gradient_dtype)):
            if dtype.name not in WIRE_DTYPES:
                raise UserError(f"{key}: elements of {dtype.name}; allowed are {', '.join(WIRE_DTYPES)}.")
        if self.num_buffers < 0:
            raise UserError(f"num_buffers={self.num_buffers}: allowed are 0 and more.")
        if self.slots < MIN_SLOTS:
            raise UserError(
                f"transport.slots={self.slots}: allowed are {MIN_SLOTS} and more, so that a reader has "
                f"time while the next versions are written. Leave it at {DEFAULT_SLOTS}; raise it when "
                "pulls often begin again."
            )

    @property
    def weights_dtype(self) -> np.dtype:
        """Elements of the ring."""
        assert self.pull_dtype is not None
        return self.pull_dtype

    @property
    def gradient_dtype(self) -> np.dtype:
        """Elements of the gradient slots."""
        assert self.push_dtype is not None
        return self.push_dtype

    @property
    def weights_bytes(self) -> int:
        """One version, as it travels."""
        return self.numel * self.weights_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """One gradient, as it travels."""
        return self.numel * self.gradient_dtype.itemsize

    @property
    def latest_offset(self) -> int:
        """The newest version, one int64."""
        return _aligned(self.slots * WORD_BYTES)

    @property
    def total_bytes(self) -> int:
        """Size of the whole window."""
        return self.buffers_offset(self.num_workers)

    def tag_offset(self, slot: int) -> int:
        """The version number in ``slot``, one int64."""
        return slot * WORD_BYTES

    def weights_offset(self, slot: int) -> int:
        """The weights in ``slot``."""
        return self.latest_offset + ALIGNMENT_BYTES + slot * _aligned(self.weights_bytes)

    def gradient_offset(self, worker: int) -> int:
        """The gradient slot of ``worker``."""
        return self.weights_offset(self.slots) + worker * _aligned(self.gradient_bytes)

    def buffers_offset(self, worker: int) -> int:
        """The buffers slot of ``worker``."""
        return self.gradient_offset(self.num_workers) + worker * _aligned(self.num_buffers * WORD_BYTES)

    def weights(self, memory: np.ndarray, slot: int) -> np.ndarray:
        """View of ``slot`` of the ring in ``memory`` (1-D uint8)."""
        offset = self.weights_offset(slot)
        return memory[offset : offset + self.weights_bytes].view(self.weights_dtype)

    def gradient(self, memory: np.ndarray, worker: int) -> np.ndarray:
        """View of a gradient slot in ``memory`` (1-D uint8)."""
        offset = self.gradient_offset(worker)
        return memory[offset : offset + self.gradient_bytes].view(self.gradient_dtype)

    def gradients(self, memory: np.ndarray) -> list[np.ndarray]:
        """Views of all gradient slots in ``memory`` (1-D uint8)."""
        return [self.gradient(memory, worker) for worker in range(self.num_workers)]

    def buffers(self, memory: np.ndarray) -> list[np.ndarray]:
        """Views of all buffers slots in ``memory`` (1-D uint8): ``num_buffers`` float64 each."""
        offsets = [self.buffers_offset(worker) for worker in range(self.num_workers)]
        size_bytes = self.num_buffers * WORD_BYTES
        return [memory[offset : offset + size_bytes].view(BUFFERS_DTYPE) for offset in offsets]

    def words(self, memory: np.ndarray, offset: int, count: int) -> np.ndarray:
        """View of ``count`` int64 at byte ``offset`` of ``memory`` (1-D uint8)."""
        return memory[offset : offset + count * WORD_BYTES].view(np.int64)


def window_bytes(
    num_workers: int,
    numel: int,
    dtype: np.dtype | type | str,
    slots: int = DEFAULT_SLOTS,
    num_buffers: int = 0,
) -> int:
    """Bytes that rank 0 allocates: what must be free in its node's shared memory.

    Raises:
        UserError: As ``WindowLayout``.
    """
    return WindowLayout(num_workers, numel, np.dtype(dtype), slots, num_buffers).total_bytes


def chunks(numel: int, max_elements: int) -> Iterator[tuple[int, int]]:
    """Ranges ``[start, stop)`` of at most ``max_elements`` that cover ``numel`` elements, in order."""
    for start in range(0, numel, max_elements):
        yield start, min(start + max_elements, numel)


class RingWriter:
    """The server's hand on the ring: the only one that stores weights, tags and ``latest``."""

    def __init__(self, layout: WindowLayout, memory: np.ndarray, sync: Callable[[], None]) -> None:
        """Mark every slot as not published.

        Args:
            layout: Of ``memory``.
            memory: 1-D uint8, ``layout.total_bytes`` long.
            sync: Memory barrier between the stores before it and those after it, for all who read the memory.
        """
        self._tags = layout.words(memory, layout.tag_offset(0), layout.slots)
        self._latest = layout.words(memory, layout.latest_offset, 1)
        self._weights = [layout.weights(memory, slot) for slot in range(layout.slots)]
        self._sync = sync
        self._tags[:] = NOT_PUBLISHED
        self._latest[0] = NOT_PUBLISHED
        sync()

    def begin(self, version: int) -> np.ndarray:
        """Invalidate the slot of ``version``, the one after the newest, and hand it out for writing."""
        slot = version % len(self._weights)
        self._tags[slot] = NOT_PUBLISHED
        self._sync()  # no reader may see a new byte of data under the old tag
        return self._weights[slot]

    def end(self, version: int) -> None:
        """Publish ``version``, which ``begin`` opened."""
        self._sync()  # the data are complete before the tag says so
        self._tags[version % len(self._weights)] = version
        self._sync()  # and the tag before latest sends readers to it
        self._latest[0] = version
        self._sync()


class RingSource(Protocol):
    """What a reader needs: three reads of the server's memory, each complete when it returns."""

    def read_weights(self, slot: int, start: int, stop: int, out: np.ndarray) -> None:
        """Copy elements ``[start, stop)`` of ``slot`` to the same place in ``out``."""

    def read_tag(self, slot: int) -> int:
        """The tag of ``slot``."""

    def read_latest(self) -> int:
        """The newest published version."""


def read_version(
    source: RingSource, slots: int, out: np.ndarray, version: int, max_elements: int
) -> Generator[None, None, tuple[int, int]]:
    """Copy one whole version into ``out``, step by step.

    Args:
        source: Where to read from.
        slots: Slots of the ring.
        out: 1-D, all elements of a version.
        version: A version that is known to be published; when it has been overwritten the newest is read.
        max_elements: Largest piece of one read.

    Yields:
        After every piece; the last time between the last piece and the look at the tag.

    Returns:
        The version really read, and how often the read had to begin again.

    Raises:
        RuntimeError: When the slot was overwritten ``MAX_RETRIES`` times in a row.
    """
    for retries in range(MAX_RETRIES):
        slot = version % slots
        for start, stop in chunks(len(out), max_elements):
            source.read_weights(slot, start, stop, out)
            yield
        if source.read_tag(slot) == version:
            return version, retries
        version = source.read_latest()
    raise RuntimeError(
        f"a pull began again {MAX_RETRIES} times because its slot was overwritten each time: "
        f"transport.slots={slots} is too small for this network; raise it"
    )
