"""Whether the server's window fits into the memory of its node, found out before it is allocated.

Imports no MPI. A window larger than the node's shared memory does not fail when it is allocated, but kills
the process with a bus error when its pages are first written.
"""

from __future__ import annotations

import os
import shutil

import psutil

from hydssp.errors import UserError
from hydssp.transport.ring import MIN_SLOTS, WORD_BYTES, WindowLayout

SHARED_MEMORY = "/dev/shm"
"""Where MPI libraries keep windows that several ranks of a node share."""
_GIB = 1 << 30


def check_memory(layout: WindowLayout, free_shared_bytes: int | None, free_bytes: int) -> None:
    """Refuse a window that does not fit.

    Args:
        layout: Of the window.
        free_shared_bytes: Free space in the node's shared memory; None when the window will not lie there.
        free_bytes: Memory of the node that is free; shared memory takes from it, too.

    Raises:
        UserError: When the window is larger than either.
    """
    is_shared_short = free_shared_bytes is not None and layout.total_bytes > free_shared_bytes
    if not is_shared_short and layout.total_bytes <= free_bytes:
        return
    parts = (
        f"{layout.slots} slots x {_size(layout.weights_bytes)} of weights + {layout.num_workers} workers x "
        f"{_size(layout.gradient_bytes)} of gradient"
    )
    if layout.num_buffers:
        parts += f" and {_size(layout.num_buffers * WORD_BYTES)} of buffers"
    free = f"{_size(free_bytes)} of memory is free"
    cures = []
    if is_shared_short:
        assert free_shared_bytes is not None
        free = f"{_size(free_shared_bytes)} is free in {SHARED_MEMORY} and {free}"
        cures.append(f"make {SHARED_MEMORY} larger (in a container e.g. --shm-size)")
    if layout.slots > MIN_SLOTS:
        cures.append(f"set transport.slots={MIN_SLOTS}")
    cures += [
        "use fewer workers, or a smaller model",
        "start fewer ranks on the node of rank 0, or use a node with more memory",
    ]
    raise UserError(
        f"transport.slots={layout.slots}: the server's window needs {_size(layout.total_bytes)} on the node "
        f"of rank 0 ({parts}), but {free}. What helps: {'; '.join(cures)}."
    )


def free_memory(is_shared: bool) -> tuple[int | None, int]:
    """This node's facts for ``check_memory``.

    Args:
        is_shared: Several ranks share the node, so that the window will lie in shared memory.
    """
    has_folder = is_shared and os.path.isdir(SHARED_MEMORY)
    return shutil.disk_usage(SHARED_MEMORY).free if has_folder else None, psutil.virtual_memory().available


def _size(size_bytes: int) -> str:
    """In GiB, or in MiB where that reads better."""
    return f"{size_bytes / _GIB:.1f} GiB" if size_bytes >= _GIB else f"{size_bytes / (1 << 20):.3g} MiB"
