import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydssp.errors import UserError
from hydssp.transport.ring import (
    ALIGNMENT_BYTES,
    NOT_PUBLISHED,
    RingWriter,
    WindowLayout,
    chunks,
    window_bytes,
)

layouts = st.builds(
    WindowLayout,
    num_workers=st.integers(1, 300),
    numel=st.integers(1, 2**40),
    dtype=st.sampled_from([np.dtype("float32"), np.dtype("float64")]),
    slots=st.integers(3, 40),
    num_buffers=st.integers(0, 2**20),
    pull_dtype=st.sampled_from([None, "float16", "uint16"]),
    push_dtype=st.sampled_from([None, "float16", "uint16"]),
)


@given(layouts)
def test_parts_are_aligned_and_fill_the_window_without_overlap(layout):
    parts = [(layout.tag_offset(0), 8 * layout.slots), (layout.latest_offset, 8)]
    parts += [(layout.weights_offset(slot), layout.weights_bytes) for slot in range(layout.slots)]
    gradients = range(layout.num_workers)
    parts += [(layout.gradient_offset(worker), layout.gradient_bytes) for worker in gradients]
    parts += [(layout.buffers_offset(worker), 8 * layout.num_buffers) for worker in range(layout.num_workers)]
    end = 0
    for offset, size in parts:
        assert offset % ALIGNMENT_BYTES == 0
        assert end <= offset < end + ALIGNMENT_BYTES
        end = offset + size
    assert end <= layout.total_bytes < end + ALIGNMENT_BYTES


def test_sizes_of_a_known_window():
    # 5 tags in one line, latest in one line, 5 + 3 vectors of 100 * 8 bytes in 13 lines each
    assert window_bytes(3, 100, "float64", slots=5) == 64 + 64 + 8 * 13 * 64
    assert window_bytes(1, 11_000_000, np.float32) == 128 + 5 * 44_000_000
    # and 3 times 9 doubles in 2 lines each
    assert window_bytes(3, 100, "float64", slots=5, num_buffers=9) == 64 + 64 + 8 * 13 * 64 + 3 * 2 * 64


def test_shorter_elements_make_the_window_smaller():
    whole, half = (
        WindowLayout(3, 6400, "float32"),
        WindowLayout(3, 6400, "float32", 4, 0, "uint16", "float16"),
    )
    assert whole.total_bytes - 128 == 2 * (half.total_bytes - 128) == 7 * 4 * 6400
    assert half.weights_bytes == half.gradient_bytes == 2 * 6400


def test_tags_lie_one_after_the_other():
    layout = WindowLayout(1, 1, np.dtype("float32"), slots=9)
    assert [layout.tag_offset(slot) for slot in range(9)] == list(range(0, 72, 8))
    assert layout.latest_offset == 128


@pytest.mark.parametrize(
    ("num_workers", "numel", "dtype", "slots", "num_buffers", "message"),
    [
        (0, 1, "float32", 4, 0, "num_workers=0"),
        (1, 0, "float32", 4, 0, "numel=0"),
        (1, 1, "int64", 4, 0, "dtype=int64.*float32, float64"),
        (1, 1, "float32", 2, 0, "transport.slots=2.*3 and more"),
        (1, 1, "float32", 4, -1, "num_buffers=-1.*0 and more"),
    ],
)
def test_values_that_are_not_allowed_are_named(num_workers, numel, dtype, slots, num_buffers, message):
    with pytest.raises(UserError, match=message):
        window_bytes(num_workers, numel, dtype, slots, num_buffers)


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_chunks_cover_everything_once(numel, max_elements):
    max_elements = max(max_elements, numel // 50 + 1)
    end = 0
    for start, stop in chunks(numel, max_elements):
        assert start == end
        assert 0 < stop - start <= max_elements
        end = stop
    assert end == numel


def test_writer_orders_its_stores_by_barriers():
    """At every barrier the memory may be seen; what is seen must never promise more than is there."""
    layout = WindowLayout(1, 4, np.dtype("float32"), slots=3)
    memory = np.full(layout.total_bytes, 0xAB, np.uint8)
    seen = []

    def words(offset, count):
        return layout.words(memory, offset, count).tolist()

    def sync():
        seen.append((words(0, 3), words(layout.latest_offset, 1)[0]))

    writer = RingWriter(layout, memory, sync)
    assert seen == [([NOT_PUBLISHED] * 3, NOT_PUBLISHED)]
    for version in range(4):
        writer.begin(version)[:] = version
        writer.end(version)
    # the last lap: invalidate slot 0, data done, tag, latest
    assert seen[-4:] == [([-1, 1, 2], 2), ([-1, 1, 2], 2), ([3, 1, 2], 2), ([3, 1, 2], 3)]
    assert layout.weights(memory, 0).tolist() == [3.0] * 4
    assert layout.weights(memory, 1).tolist() == [1.0] * 4
