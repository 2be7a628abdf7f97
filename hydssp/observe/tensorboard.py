"""TensorBoard files of a run, from one writer on the server.

One job: hand the numbers of progress and evaluation records to TensorBoard, by samples trained on. Imports torch's
writer, and with it the optional package tensorboard, only when it is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydssp.errors import UserError


class Board:
    """One event file in ``folder``; torch's writer hands the numbers to a thread of its own."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def scalars(self, prefix: str, record: Mapping[str, Any]) -> None:
        """Add every number of ``record``, which has ``samples``, as ``prefix/key``."""
        for key, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(f"{prefix}/{key}", value, record["samples"])

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


def open_board(wanted: bool | None, folder: Path | None) -> Board | None:
    """Open the writer.

    Args:
        wanted: True, False, or None: if it is installed.
        folder: Of the run; None: only find out whether it could be opened.

    Raises:
        UserError: When it is wanted and not installed.
    """
    if wanted is False:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        if wanted is None:
            return None
        raise UserError(
            f"tensorboard=true: it cannot be imported ({error}); pip install tensorboard, or set tensorboard=false"
        ) from error
    return Board(SummaryWriter(str(folder))) if folder is not None else None
