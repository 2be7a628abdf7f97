"""A recorded run through a fresh coordinator: does it decide again as it did?

One job: feed the recorded calls and compare the answers. Standard library and coordination only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydssp.coordination.coordinator import Coordinator
from hydssp.coordination.events import Decision, Outcome, ProtocolError
from hydssp.simulation.recording import Call, Recording


@dataclass
class Replay:
    """What the comparison came to.

    Attributes:
        num_calls: Calls of the coordinator.
        num_pushes: Pushes in them.
        num_releases: Releases that were recorded.
        num_holds: Holds that were recorded.
        differences: Each difference in words; empty: none.
    """

    num_calls: int = 0
    num_pushes: int = 0
    num_releases: int = 0
    num_holds: int = 0
    differences: list[str] = field(default_factory=list)


def replay(recording: Recording, coordinator: Coordinator) -> Replay:
    """Run the recorded calls through ``coordinator``, a new one.

    A release that finds no batch left is not granted, so that the log shows the worker finish instead.
    """
    result = Replay(num_calls=len(recording.calls))
    calls = recording.calls
    for number, call in enumerate(calls):
        try:
            outcome = _repeat(coordinator, call)
        except (ProtocolError, ValueError) as error:
            result.differences.append(
                f"call {number} ({call.kind} at {call.now:.6f} s) cannot have happened: {error}"
            )
            break
        result.num_pushes += len(call.pushes)
        result.num_releases += len(call.releases)
        result.num_holds += len(call.holds)
        following = calls[number + 1] if number + 1 < len(calls) else None
        told_to_go = set(following.workers) if following is not None and following.kind == "finish" else set()
        expected = [_recorded(r) for r in call.releases]
        decided = [_decided(d) for d in outcome.releases]
        granted = [d for d in decided if d in expected or d[0] not in told_to_go]
        for what, before, again in (
            ("releases", expected, granted),
            ("holds", [_recorded(r) for r in call.holds], [_decided(d) for d in outcome.holds]),
        ):
            # A run that was cut off may lack the last answers.
            if before != again and not (following is None and before == again[: len(before)]):
                result.differences.append(
                    f"call {number} ({call.kind} at {call.now:.6f} s): recorded {what} {before}, decided {again}"
                )
    return result


def _repeat(coordinator: Coordinator, call: Call) -> Outcome:
    if call.kind == "start":
        return coordinator.start(call.now)
    if call.kind == "pushes":
        return coordinator.on_pushes(call.pushes, call.now)
    if call.kind == "finish":
        return coordinator.on_finish(call.workers, call.now)
    return coordinator.on_failure(call.workers, call.now)


_Key = tuple[int, str, float, int, int, int, float, int]


def _recorded(record: dict[str, Any]) -> _Key:
    keys = ("w", "cause", "at", "clock", "lead", "ahead", "held_since", "ext")
    values: _Key = tuple(record[key] for key in keys)
    return values


def _decided(decision: Decision) -> _Key:
    return (
        decision.worker, decision.cause.value, decision.at, decision.clock, decision.lead, decision.run_ahead,
        decision.held_since, decision.extension,
    )  # fmt: skip
