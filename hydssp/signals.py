"""Signals that ask a run to end in order.

One job: remember that one came. The handler does nothing else, because writing files or entering MPI inside a signal
handler can hang or corrupt; the loops look here between two steps. A second Ctrl-C is taken for impatience and
interrupts; batch systems and launchers repeat the other signals, which changes nothing.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

PREEMPTED, INTERRUPTED = 75, 130
_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: PREEMPTED, signal.SIGUSR1: PREEMPTED}


class StopRequest:
    """Whether a signal has asked this rank to stop. Used as a context, which restores the handlers.

    Attributes:
        code: Exit code that the first signal asks for: 130 after SIGINT (Ctrl-C), 75 after SIGTERM or SIGUSR1 (the
            batch system is about to end the job); 0: none came.
    """

    def __init__(self) -> None:
        self.code = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        """Install the handlers; only the main thread may."""
        for number in _CODES:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Put back the handlers that were there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.code:
            self.code = _CODES[signal.Signals(number)]
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])
