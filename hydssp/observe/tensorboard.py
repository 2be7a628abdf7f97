"""TensorBoard files of a run, from one writer on the server.

One job: hand the numbers of progress and evaluation records to TensorBoard, by samples trained on. Imports torch's
writer, and with it the optional package tensorboard, only when it is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def histogram(
        self,
        name: str,
        bins: Sequence[tuple[float, float, int]],
        *,
        sums: tuple[float, float],
        samples: int,
    ) -> None:
        """Add a histogram that was counted elsewhere.

        Args:
            name: Its tag.
            bins: ``(from, to, count)`` in rising order, at least one.
            sums: Of the values and of their squares.
            samples: Where it lies on the axis.
        """
        self._writer.add_histogram_raw(
            name,
            min=bins[0][0],
            max=bins[-1][1],
            num=sum(count for *_, count in bins),
            sum=sums[0],
            sum_squares=sums[1],
            bucket_limits=[high for _, high, _ in bins],
            bucket_counts=[count for *_, count in bins],
            global_step=samples,
        )

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
