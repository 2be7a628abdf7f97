"""The paradigms: which switches a user may set, and the rules that the coordinator reads from them.

Frozen data without state or decisions; imports the standard library only. Every paradigm turns into one
``Rules``, and the coordinator knows nothing else of it: a new paradigm is one more dataclass here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hydssp.errors import UserError

GrantCount = Literal["exact", "literal"]
Release = Literal["next_push", "gap"]
Ask = Literal["any", "fastest"]
Cap = Literal["run_ahead", "lead", "none"]
Late = Literal["clamp", "none"]
Interval = Literal["processing", "push_to_push"]
Apply = Literal["per_push", "per_round"]


@dataclass(frozen=True)
class Rules:
    """What the coordinator reads: two bounds and one value per switch.

    A worker goes on when it has a permit (lead <= s_lower, or an extension, or an awaited push) and the cap
    is open.
    """

    s_lower: int | float
    """Largest lead, in clocks, that needs no extension; ``math.inf``: no bound."""
    s_upper: int | float
    """The bound of the cap, in clocks; ``s_upper - s_lower`` is the largest extension."""
    grant: GrantCount = "exact"
    """``exact``: an extension r* is r* iterations; ``literal``: r* + 1, as the paper prints it."""
    release: Release = "next_push"
    """``next_push``: the next push of a slowest worker is a permit too; ``gap``: only lead <= s_lower is."""
    ask: Ask = "any"
    """Who may be given an extension: ``any`` worker, or only the ``fastest`` (all at max(t))."""
    cap: Cap = "run_ahead"
    """What may not exceed s_upper at a grant: ``run_ahead`` over a computing worker, ``lead``, ``none``."""
    late: Late = "clamp"
    """``clamp``: no extension while the slowest worker is overdue; ``none``: as printed, no such rule."""
    interval: Interval = "processing"
    """What predicts a push: the time from grant to push (``processing``) or between the last two pushes."""
    apply: Apply = "per_push"
    """``per_push``: each push is applied as it comes; ``per_round``: one update per round of all workers."""

    def __post_init__(self) -> None:
        for key, value in (("s_lower", self.s_lower), ("s_upper", self.s_upper)):
            if value != math.inf:
                _check_bound(key, value)
        if self.s_upper < self.s_lower or (self.s_upper == math.inf and self.s_lower != math.inf):
            raise UserError(
                f"paradigm.s_upper={self.s_upper}: must be an integer >= paradigm.s_lower ({self.s_lower}); "
                "raise s_upper or lower s_lower"
            )
        _check_choice("grant", self.grant, get_args(GrantCount))
        _check_choice("release", self.release, get_args(Release))
        _check_choice("ask", self.ask, get_args(Ask))
        _check_choice("cap", self.cap, get_args(Cap))
        _check_choice("late", self.late, get_args(Late))
        _check_choice("interval", self.interval, get_args(Interval))
        _check_choice("apply", self.apply, get_args(Apply))
        if self.apply == "per_round" and (self.s_upper != 0 or self.release != "gap"):
            # A worker that goes on inside a round would overwrite the gradient that the round still needs.
            raise UserError(
                "paradigm.apply=per_round: allowed only with s_lower 0, s_upper 0 and release gap "
                f"(a barrier), not with s_upper {self.s_upper} and release {self.release}; use per_push"
            )

    @property
    def r_max(self) -> int:
        """Largest extension; 0: the controller is never asked."""
        return 0 if self.s_lower == self.s_upper else int(self.s_upper - self.s_lower)


class Paradigm(ABC):
    """What the user chooses: something that has rules."""

    @property
    @abstractmethod
    def rules(self) -> Rules:
        """The rules that the coordinator follows."""

    @property
    def is_synchronous(self) -> bool:
        """Whether all gradients of a round make one update."""
        return self.rules.apply == "per_round"

    @property
    def recording(self) -> Any:
        """The run whose order of arrivals is forced; None: pushes are handled as they come."""
        return None


@dataclass(frozen=True)
class BSP(Paradigm):
    """Bulk synchronous parallel: every worker waits for all others after every push.

    One update per round from all gradients of the round. Lead 0 at a start and at most 1 after a push; no
    pushes by others between a worker's grant and its push other than those of the same round, so staleness is
    0.
    """

    @property
    def rules(self) -> Rules:
        """A barrier, one update per round."""
        return Rules(s_lower=0, s_upper=0, release="gap", cap="none", apply="per_round")


@dataclass(frozen=True)
class ASP(Paradigm):
    """Asynchronous parallel: nobody ever waits, every push is applied at once.

    No bound on lead, run-ahead or staleness.
    """

    @property
    def rules(self) -> Rules:
        """No bound, no cap."""
        return Rules(s_lower=math.inf, s_upper=math.inf, release="gap", cap="none")


@dataclass(frozen=True)
class SSP(Paradigm):
    """Stale synchronous parallel (Ho et al. 2013): who is more than ``s`` clocks ahead waits for the slowest.

    Lead <= s when an iteration starts and <= s+1 right after a push. At most (P-1)*(2s+1) pushes by others
    between a worker's grant and its push. SSP(0) is a barrier.
    """

    s: int = 3
    """Largest lead at the start of an iteration, >= 0. Published as the staleness; what it bounds is the
    lead."""

    def __post_init__(self) -> None:
        _check_bound("s", self.s)

    @property
    def rules(self) -> Rules:
        """Lead <= s and nothing else."""
        return Rules(s_lower=self.s, s_upper=self.s, release="gap", cap="none")


@dataclass(frozen=True)
class DSSP(Paradigm):
    """Dynamic SSP (Zhao et al. 2019): beyond ``s_lower`` a controller extends as far as it saves waiting.

    A worker that is refused an extension waits for the next push of a slowest worker, or until its lead is
    within s_lower (``release``). Bounds, for P workers, by ``cap``:

    - ``run_ahead`` (default): while a worker computes one gradient every other worker pushes at most s_upper
      + 1 times, so no gradient is staler than (P-1)*(s_upper+1). The lead has no bound under permanent speed
      differences.
    - ``lead``: lead <= s_upper when an iteration starts and <= s_upper+1 right after a push; at most
      (P-1)*(2*s_upper+1) pushes by others between a worker's grant and its push.
    - ``none``: no bound.
    """

    s_lower: int = 3
    """Lead that is always allowed, >= 0."""
    s_upper: int = 15
    """Bound of the cap, >= s_lower; the controller extends by at most s_upper - s_lower."""
    grant: GrantCount = "exact"
    release: Release = "next_push"
    ask: Ask = "any"
    cap: Cap = "run_ahead"
    late: Late = "clamp"
    interval: Interval = "processing"

    def __post_init__(self) -> None:
        _check_bound("s_lower", self.s_lower)
        _check_bound("s_upper", self.s_upper)
        _ = self.rules  # checks the rest

    @property
    def rules(self) -> Rules:
        """The switches as given, applied per push."""
        return Rules(
            s_lower=self.s_lower,
            s_upper=self.s_upper,
            grant=self.grant,
            release=self.release,
            ask=self.ask,
            cap=self.cap,
            late=self.late,
            interval=self.interval,
        )

    @classmethod
    def bounded(cls, s_lower: int = 3, s_upper: int = 15) -> DSSP:
        """The preset ``dssp_bounded``: lead <= s_upper at every start, the premise of the paper's theorem.

        With s_lower = s_upper = s it releases as SSP(s) does, push for push.
        """
        return cls(s_lower, s_upper, release="gap", cap="lead", ask="any")

    @classmethod
    def paper(cls, s_lower: int = 3, s_upper: int = 15) -> DSSP:
        """The preset ``dssp_paper``: the paper's Figure 2. No bound on lead or staleness."""
        return cls(
            s_lower,
            s_upper,
            grant="exact",
            release="next_push",
            ask="fastest",
            cap="none",
            late="none",
            interval="push_to_push",
        )


def _check_bound(key: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(
            f"paradigm.{key}={value!r}: must be an integer >= 0 (clocks); set it to a whole number"
        )


def _check_choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"paradigm.{key}={value!r}: must be one of {', '.join(allowed)}; choose one of them")
