"""What goes into the coordinator and what comes out of it.

Plain data: imports the standard library only, reads no clock. Times are seconds on the server's clock,
counted from the start of the run. Workers are numbered 0 .. P-1 (MPI rank minus one).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class ProtocolError(RuntimeError):
    """An event that cannot have happened, e.g. a push without a grant; the state is unchanged."""


class Push(NamedTuple):
    """One clock message: a worker has put a gradient into its slot."""

    worker: int
    at: float
    """When the worker finished its put, mapped to the server's clock; not after ``now`` and not before its
    grant."""
    is_last: bool = False
    """No further iteration follows: the worker leaves the active set with this push."""
    has_gradient: bool = True
    """False for an empty, refused or skipped push: it advances the clock and releases, and makes no
    update."""


class Cause(Enum):
    """Why a worker was released or held.

    A release names the first ground of its permit that holds at the grant: lead, extension, awaited push.
    """

    START = "start"
    LEAD = "lead"
    EXTENSION = "extension"
    AWAITED_PUSH = "awaited_push"
    HELD_BY_RULE = "held_by_rule"
    HELD_BY_CAP = "held_by_cap"


class Decision(NamedTuple):
    """One release or hold. ``reason`` is made when it is read, so that the push path builds no strings."""

    worker: int
    cause: Cause
    at: float
    """When it was decided, seconds; for a release the time of the grant."""
    clock: int
    lead: int
    run_ahead: int
    """Pushes of the worker since the oldest grant of a worker that is computing."""
    held_since: float
    """When the wait began (the server counted the push, seconds); equal to ``at`` for a worker that did not
    wait."""
    extension: int = 0
    """Iterations of the extension that are left after this decision."""
    details: tuple[tuple[str, float], ...] = ()
    """Numbers that only the reason needs."""

    @property
    def wait_s(self) -> float:
        """How long the worker has waited so far, seconds."""
        return self.at - self.held_since

    @property
    def reason(self) -> str:
        """The decision in words."""
        number = dict(self.details)
        if self.cause is Cause.START:
            return f"worker {self.worker} starts: the first grant"
        if self.cause is Cause.HELD_BY_CAP:
            if "run_ahead_over" in number:
                what, value, over = "run-ahead", self.run_ahead, int(number["run_ahead_over"])
            else:
                what, value, over = "lead", self.lead, int(number["lead_over"])
            return (
                f"worker {self.worker} held by the cap: {what} {value} over worker {over} exceeds "
                f"s_upper {number['s_upper']:.0f}; {_expectation(over, number, self.at)}"
            )
        bound = f"the bound {number['s_lower']:.0f}"  # s_lower, s or a round's 0, as the paradigm calls it
        if self.cause is Cause.HELD_BY_RULE:
            over = int(number["lead_over"])
            refusal = ", and the controller gives no extension" if "is_asked" in number else ""
            return (
                f"worker {self.worker} held by the rule: lead {self.lead} over worker {over} exceeds "
                f"{bound}{refusal}; {_expectation(over, number, self.at)}"
            )
        waited = f"; waited {self.wait_s:.3g} s" if self.wait_s > 0 else ""
        if self.cause is Cause.LEAD:
            return f"worker {self.worker} goes on: lead {self.lead} is within {bound}{waited}"
        if self.cause is Cause.EXTENSION:
            return (
                f"worker {self.worker} goes on by extension: lead {self.lead} exceeds {bound}, "
                f"{self.extension} left after this iteration{waited}"
            )
        return (
            f"worker {self.worker} goes on: a slowest worker has pushed since it was held "
            f"(lead {self.lead}, {bound}){waited}"
        )


def _expectation(worker: int, number: dict[str, float], at: float) -> str:
    """Words for when the push of ``worker`` is due, seen at time ``at``."""
    if "expected_at" not in number:
        return f"worker {worker} has not pushed yet"
    late_s = at - number["expected_at"]
    if late_s > 0:
        return f"worker {worker}'s push is {late_s:.3g} s late"
    return f"worker {worker}'s push is expected in {-late_s:.3g} s"


class Outcome(NamedTuple):
    """What the caller has to do after an event, in this order: apply, then release."""

    apply: tuple[int, ...] = ()
    """Workers whose pending gradients make one update now, in worker order; empty: no update."""
    releases: tuple[Decision, ...] = ()
    """Workers that go on, in worker order."""
    holds: tuple[Decision, ...] = ()
    """Workers that pushed in this event and have to wait, in worker order."""
    ignored: tuple[int, ...] = ()
    """Workers whose push was ignored because they are not active any more."""
