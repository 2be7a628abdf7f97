"""How long to pause between two polls: a short spin first where cores are to spare, then growing sleeps.

Standard library only; imports no MPI. Clock and sleep are arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SPIN_S = 200e-6
"""Spin before the first sleep: longer than a grant takes to come back from a server that is awake."""
SLEEP_MIN_S = 50e-6
SLEEP_MAX_S = 1e-3
"""Longest sleep. Also how long a server may stay outside MPI while workers are active."""


class Backoff:
    """The pause of a polling loop: ``wait()`` after a poll that found nothing, ``reset()`` otherwise."""

    def __init__(
        self,
        spin_s: float,
        sleep_min_s: float = SLEEP_MIN_S,
        sleep_max_s: float = SLEEP_MAX_S,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start as after ``reset()``.

        Args:
            spin_s: For this long after the first ``wait()`` return at once, seconds; 0 never spins.
            sleep_min_s: First sleep, seconds, above 0. Each further one is twice as long.
            sleep_max_s: Longest sleep, seconds.
            clock: Monotonic seconds; read only while spinning.
            sleep: Sleeps for the seconds given.

        Raises:
            ValueError: When ``spin_s`` is negative or not ``0 < sleep_min_s <= sleep_max_s``.
        """
        if spin_s < 0 or not 0 < sleep_min_s <= sleep_max_s:
            raise ValueError(
                "need spin_s >= 0 and 0 < sleep_min_s <= sleep_max_s, "
                f"got {spin_s}, {sleep_min_s}, {sleep_max_s}"
            )
        self._spin_s = spin_s
        self._sleep_min_s = sleep_min_s
        self._sleep_max_s = sleep_max_s
        self._clock = clock
        self._sleep = sleep
        self.reset()

    def reset(self) -> None:
        """Something happened: the next waits are short again."""
        self._spin_until: float | None = None
        self._is_spinning = self._spin_s > 0
        self._next_sleep_s = self._sleep_min_s

    def wait(self) -> None:
        """Return at once while spinning, sleep afterwards."""
        if self._is_spinning:
            now = self._clock()
            if self._spin_until is None:
                self._spin_until = now + self._spin_s
            if now < self._spin_until:
                return
            self._is_spinning = False
        self._sleep(self._next_sleep_s)
        self._next_sleep_s = min(2 * self._next_sleep_s, self._sleep_max_s)


def choose_backoff(num_ranks: int, num_cores: int) -> Backoff:
    """The back-off that suits a node.

    A spinning rank on a full node takes the core from the very rank it is waiting for, so there it sleeps at
    once.

    Args:
        num_ranks: Ranks of the job on this node.
        num_cores: Cores that these ranks may use together.
    """
    return Backoff(SPIN_S if num_ranks <= num_cores else 0.0)
