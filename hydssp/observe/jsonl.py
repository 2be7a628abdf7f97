"""JSON-lines files: one strict JSON object a line, buffered, cheap enough for the server loop.

Knows nothing of what the records mean and reads no clock (``now`` is an argument). A file that cannot be
written any more, as on a full disk, must not end a training run: the writer warns once and drops the rest.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), check_circular=False).encode


def to_strict(value: Any) -> Any:
    """``value`` as strict JSON takes it, in dicts and lists too: nan and inf are None, keys are text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_strict(item) for item in value]
    return value


class JsonLinesWriter:
    """Appends records to a file. The buffer is written when full or old, on ``flush`` and on ``close``."""

    def __init__(
        self, path: str | os.PathLike[str], *, max_buffer_bytes: int = 1 << 16, max_age_s: float = 1.0
    ) -> None:
        """Open the file for appending.

        Args:
            path: The file; its folder exists.
            max_buffer_bytes: Characters kept before they are written.
            max_age_s: Longest time in seconds that a record stays in the buffer while ``write`` or
                ``flush_if_old`` is being called.
        """
        self.path = Path(path)
        self.num_dropped = 0
        """Records lost because the file could not be written."""
        self._max_buffer_bytes = max_buffer_bytes
        self._max_age_s = max_age_s
        self._lines: list[str] = []
        self._buffered = 0
        self._flushed_at = -math.inf
        self._is_broken = False
        self._is_closed = False
        # Unbuffered below: with a second buffer, a record that failed to be written would fail again at
        # close.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def write(self, record: Mapping[str, Any], now: float = -math.inf) -> None:
        """Add one record.

        Args:
            record: Str keys and JSON values; nan and inf become null.
            now: Seconds on any one clock; without it the record's age does not count.
        """
        try:
            line = _encode(record)
        except ValueError:
            line = _encode(to_strict(record))
        self._lines.append(line)
        self._buffered += len(line) + 1
        if self._buffered >= self._max_buffer_bytes or now - self._flushed_at >= self._max_age_s:
            self.flush(now)

    def flush_if_old(self, now: float) -> None:
        """Write the buffer when ``max_age_s`` has passed since the last time."""
        if self._lines and now - self._flushed_at >= self._max_age_s:
            self.flush(now)

    def flush(self, now: float | None = None) -> None:
        """Write the buffer to the file."""
        if now is not None and now > self._flushed_at:
            self._flushed_at = now
        if not self._lines:
            return
        lines, self._lines, self._buffered = self._lines, [], 0
        if self._is_broken or self._is_closed:
            self.num_dropped += len(lines)
            return
        data = memoryview(("\n".join(lines) + "\n").encode())
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            self._is_broken = True
            self.num_dropped += len(lines)
            _log.warning("%s cannot be written any more (%s); the run goes on without it", self.path, error)

    def close(self) -> None:
        """Write the buffer and close the file; idempotent."""
        if not self._is_closed:
            self.flush()
            self._is_closed = True
            self._file.close()


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a file, in order. A last line cut short, as a killed run leaves it, is passed over.

    Raises:
        ValueError: When a line in the middle is no JSON object.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith("\n"):
                    return
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            yield record
