import os

import numpy as np
import pytest

from hydssp.errors import UserError
from hydssp.transport import memory
from hydssp.transport.memory import check_memory, free_memory
from hydssp.transport.ring import WindowLayout

GIB = 1 << 30
LAYOUT = WindowLayout(num_workers=3, numel=GIB // 4, dtype=np.dtype("float32"), slots=5)  # 8 GiB


def test_a_window_that_just_fits_is_allowed():
    check_memory(LAYOUT, free_shared_bytes=LAYOUT.total_bytes, free_bytes=LAYOUT.total_bytes)
    check_memory(LAYOUT, free_shared_bytes=None, free_bytes=LAYOUT.total_bytes)


def refusal(layout, free_shared_bytes, free_bytes):
    with pytest.raises(UserError) as raised:
        check_memory(layout, free_shared_bytes, free_bytes)
    return str(raised.value)


def test_too_little_shared_memory_is_told_with_sizes_and_cures():
    message = refusal(LAYOUT, LAYOUT.total_bytes - 1, 100 * GIB)
    for part in (
        "transport.slots=5",
        "needs 8.0 GiB",
        "5 slots x 1.0 GiB of weights + 3 workers x 1.0 GiB of gradient",
        "8.0 GiB is free in /dev/shm and 100.0 GiB of memory is free",
        "--shm-size",
        "transport.slots=3",
        "fewer ranks on the node of rank 0",
    ):
        assert part in message, message


def test_too_little_memory_is_told_without_blaming_the_shared_memory():
    message = refusal(LAYOUT, 100 * GIB, 2 * GIB)
    assert "but 2.0 GiB of memory is free" in message
    assert "/dev/shm" not in message
    assert refusal(LAYOUT, None, 2 * GIB) == message


def test_small_sizes_and_buffers_read_well():
    layout = WindowLayout(1, 1 << 18, np.dtype("float32"), slots=3, num_buffers=1 << 17)
    message = refusal(layout, 1 << 20, GIB)
    assert "3 slots x 1 MiB of weights + 1 workers x 1 MiB of gradient and 1 MiB of buffers" in message
    assert "set transport.slots" not in message  # it has the smallest ring already


def test_facts_of_this_node(tmp_path, monkeypatch):
    shared_bytes, free_bytes = free_memory(is_shared=False)
    assert shared_bytes is None
    assert 0 < free_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(memory, "SHARED_MEMORY", str(tmp_path))
    shared_bytes, _ = free_memory(is_shared=True)
    assert shared_bytes > 0
    monkeypatch.setattr(memory, "SHARED_MEMORY", str(tmp_path / "absent"))
    assert free_memory(is_shared=True)[0] is None
