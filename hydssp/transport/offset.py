"""Maps a worker's time stamps to the server's clock.

Pure arithmetic: reads no clock, imports the standard library only. The estimate is the one of NTP (RFC 5905):
of all exchanges server -> worker -> server, the one with the smallest error bound counts.
"""

from __future__ import annotations

import math

from hydssp.transport.messages import Stamps

DRIFT = 50e-6
"""How fast two clocks may part, seconds per second: an undisciplined quartz."""


class ClockOffset:
    """Worker's clock minus server's clock, from exchanges that carry four stamps.

    An exchange is known to be right within half its round trip, and gets worse with its age by ``drift``, as
    with the time the worker kept it (its clock ran on its own meanwhile). Both grow for all exchanges alike,
    so that the best one is the one with the smallest ``bound - drift * arrived``: one number to remember, no
    window. A tight exchange outlives looser ones until drift has made it as uncertain as they are (1 ms after
    20 s).
    """

    def __init__(self, drift: float = DRIFT) -> None:
        """Start with offset 0 and no bound on its error.

        Args:
            drift: Relative speed by which the clocks may differ, >= 0.
        """
        self.offset_s = 0.0
        self._drift = drift
        self._best = math.inf

    def observe(self, sent: float, received: float, replied: float, arrived: float) -> None:
        """Take one exchange into account.

        Args:
            sent: The server sent, seconds on the server's clock.
            received: The worker received, seconds on the worker's clock.
            replied: The worker replied, seconds on the worker's clock.
            arrived: The server had the reply, seconds on the server's clock.
        """
        kept_s = replied - received
        round_trip_s = max((arrived - sent) - kept_s, 0.0)
        score = round_trip_s / 2 + self._drift * kept_s - self._drift * arrived
        if score <= self._best:
            self._best = score
            self.offset_s = ((received - sent) + (replied - arrived)) / 2

    def error_s(self, now: float) -> float:
        """Error bound of ``offset_s`` at server time ``now``, seconds; infinite before any exchange."""
        return self._best + self._drift * now

    def to_server(self, stamps: Stamps, received_at: float) -> tuple[float, float]:
        """A push's two worker times on the server's clock, corrected where they contradict causality.

        The grant was sent before it was seen, seen before the push, and the push was over before its message
        came. So a worker's stamps also never run backwards when the estimate changes.

        Args:
            stamps: As they came with the clock message.
            received_at: When the server had the message, seconds on the server's clock.

        Returns:
            granted_at and pushed_at with ``grant_sent_at <= granted_at <= pushed_at <= received_at``.
        """
        pushed_at = min(max(stamps.pushed_at - self.offset_s, stamps.grant_sent_at), received_at)
        granted_at = min(max(stamps.granted_at - self.offset_s, stamps.grant_sent_at), pushed_at)
        return granted_at, pushed_at
