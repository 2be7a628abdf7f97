"""Worlds in virtual time for tests of the coordinator, and a naive reference for its decisions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hydssp.coordination import ASP, BSP, DSSP, SSP, Cause, Coordinator, Outcome, Push, Rules

ALL_SWITCHES = [
    dict(zip(("grant", "release", "ask", "cap", "late", "interval"), values, strict=True))
    for values in itertools.product(
        ("exact", "literal"),
        ("next_push", "gap"),
        ("any", "fastest"),
        ("run_ahead", "lead", "none"),
        ("clamp", "none"),
        ("processing", "push_to_push"),
    )
]
assert len(ALL_SWITCHES) == 96
PRESETS = [BSP(), ASP(), SSP(0), SSP(1), SSP(3), DSSP(), DSSP(1, 4), DSSP.bounded(1, 3), DSSP.paper(1, 5)]


@dataclass(frozen=True)
class World:
    """What workers do, whatever the coordinator says."""

    durations: tuple[tuple[float, ...], ...]
    """Per worker, iteration times in order, used again from the first."""
    quotas: tuple[int, ...]
    """Pushes after which a worker has no more work."""
    endings: tuple[str, ...]
    """``last``: its last push says so; ``grant``: it finishes at its next grant; ``held``: even while it is
    held."""
    failures: tuple[tuple[float, int], ...] = ()
    """(time, worker)."""
    delay: float = 0.0
    """How long after an arrival the server looks: what has arrived by then comes together."""
    empty_every: int = 0
    """Every so many pushes one has no gradient; 0: never."""

    @property
    def num_workers(self) -> int:
        return len(self.durations)


def simple_world(*durations: tuple[float, ...], quota: int = 30) -> World:
    return World(durations, (quota,) * len(durations), ("last",) * len(durations))


def random_world(seed: int, num_workers: int, quota: int) -> World:
    """A world with equal times, heavy tails or stalls, late looks, failures, and finishes of every kind."""
    rng = random.Random(seed)
    means = [rng.choice((1, 1, 1, 2, 3, 7)) for _ in range(num_workers)]
    draw: Callable[[float], float] = rng.choice(
        (
            lambda mean: mean,
            lambda mean: float(rng.randint(0, 3) * mean),
            lambda mean: rng.gammavariate(100, mean / 100),
            lambda mean: rng.gammavariate(1, mean),
            lambda mean: mean * rng.paretovariate(1.1),
            lambda mean: mean * (60 if rng.random() < 0.05 else 1),
        )
    )
    kinds = rng.choice((("last",), ("grant",), ("last", "grant", "held")))
    failures: list[tuple[float, int]] = []
    if rng.random() < 0.4:
        failing = rng.sample(range(num_workers), rng.randint(1, num_workers))
        failures = [(rng.choice((0.0, 1.0, 2.0, rng.uniform(0, 3 * quota))), worker) for worker in failing]
    return World(
        durations=tuple(tuple(draw(mean) for _ in range(quota)) for mean in means),
        quotas=tuple(rng.randint(1, quota) for _ in means),
        endings=tuple(rng.choice(kinds) for _ in means),
        failures=tuple(sorted(failures)),
        delay=rng.choice((0.0, 0.0, 0.3, 2.0)),
        empty_every=rng.choice((0, 0, 3)),
    )


@dataclass
class Trace:
    """What happened: events as they can be stored and replayed, and what came back."""

    events: list[tuple[str, Any, float]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    staleness_max: int = 0
    """Versions between pull and apply."""
    others_max: int = 0
    """Pushes by all others between a worker's grant and its push."""
    one_other_max: int = 0
    """Pushes by one other worker between a worker's grant and its push."""
    num_grants: list[int] = field(default_factory=list)


def replay(coordinator: Any, event: tuple[str, Any, float]) -> Outcome:
    kind, what, now = event
    if kind == "start":
        return coordinator.start(now)
    if kind == "pushes":
        return coordinator.on_pushes([Push(*push) for push in what], now)
    return getattr(coordinator, f"on_{kind}")(what, now)


def run(
    world: World,
    rules: Rules,
    check: Callable[[Coordinator, tuple[str, Any, float], Outcome], None] | None = None,
) -> Trace:
    """Run ``world`` to its end; fails if somebody waits while nobody computes.

    Args:
        world: The workers.
        rules: What the coordinator follows.
        check: Called after every event.
    """
    num_workers = world.num_workers
    coordinator = Coordinator(rules, num_workers)
    trace = Trace(num_grants=[0] * num_workers)
    finish_at: dict[int, float] = {}
    num_pushed = [0] * num_workers
    failures = list(world.failures)
    version = 0
    pulled = [0] * num_workers
    seen = [[0] * num_workers for _ in range(num_workers)]  # [computing worker][pushing worker]

    def happen(kind: str, what: Any, now: float) -> None:
        nonlocal version
        event = (kind, what, now)
        outcome = replay(coordinator, event)
        trace.events.append(event)
        trace.outcomes.append(outcome)
        if kind == "pushes":
            pushed = [push[0] for push in what]
            for one in range(num_workers):
                for other in pushed:
                    if other != one and (one in finish_at or one in pushed):
                        seen[one][other] += 1
            for worker in pushed:
                trace.others_max = max(trace.others_max, sum(seen[worker]))
                trace.one_other_max = max(trace.one_other_max, *seen[worker])
        for worker in outcome.apply:
            trace.staleness_max = max(trace.staleness_max, version - pulled[worker])
        version += bool(outcome.apply)
        if check:
            check(coordinator, event, outcome)
        assert not coordinator.num_active or coordinator.computing, f"nobody computes at {now}"
        leaves = []
        for release in outcome.releases:
            worker = release.worker
            trace.num_grants[worker] += 1
            pulled[worker] = version
            seen[worker] = [0] * num_workers
            if num_pushed[worker] >= world.quotas[worker]:
                leaves.append(worker)
            else:
                times = world.durations[worker]
                finish_at[worker] = now + times[num_pushed[worker] % len(times)]
        for hold in outcome.holds:
            if num_pushed[hold.worker] >= world.quotas[hold.worker] and world.endings[hold.worker] == "held":
                leaves.append(hold.worker)
        if leaves:
            happen("finish", leaves, now)

    happen("start", None, 0.0)
    now = 0.0
    while coordinator.num_active:
        due = min(finish_at.values(), default=math.inf)
        if failures and failures[0][0] <= due:
            at, worker = failures.pop(0)
            now = max(now, at)
            finish_at.pop(worker, None)
            happen("failure", [worker], now)
            continue
        now = due + world.delay
        arrived = sorted(worker for worker, at in finish_at.items() if at <= now)
        pushes = []
        for worker in arrived:
            at = finish_at.pop(worker)
            num_pushed[worker] += 1
            is_last = num_pushed[worker] == world.quotas[worker] and world.endings[worker] == "last"
            is_empty = world.empty_every > 0 and (sum(num_pushed) % world.empty_every == 0)
            pushes.append((worker, at, is_last, not is_empty))
        happen("pushes", pushes, now)
    failed = {worker for _, worker in world.failures}
    for worker in range(num_workers):
        assert num_pushed[worker] == world.quotas[worker] or worker in failed
    return trace


class Reference:
    """The release rule derived afresh after every event, in O(P^2), with pair counters for the run-ahead."""

    def __init__(self, rules: Rules, num_workers: int) -> None:
        everyone = range(num_workers)
        self.rules = rules
        self.t = [0] * num_workers
        self.active = set(everyone)
        self.computing: set[int] = set()
        self.held_since: dict[int, float] = {}
        self.permit: set[int] = set()
        self.extension = [0] * num_workers
        self.granted_at = [0.0] * num_workers
        self.push_times: list[list[float]] = [[] for _ in everyone]
        self.first_grant = 0.0
        self.processing = [0.0] * num_workers
        self.ahead = [[0] * num_workers for _ in everyone]  # [p][j]: pushes of p since j's grant
        self.round_pushed: set[int] = set()
        self.round_gradients: set[int] = set()

    def min(self) -> int:
        return min((self.t[w] for w in self.active), default=0)

    def lead(self, p: int) -> int:
        return self.t[p] - self.min()

    def run_ahead(self, p: int) -> int:
        return max((self.ahead[p][j] for j in self.computing if j != p), default=0)

    def interval(self, w: int) -> float:
        times = self.push_times[w]
        if self.rules.interval == "push_to_push" and len(times) > 1:
            return times[-1] - times[-2]
        return self.processing[w] if times else 0.0

    def expected(self, w: int, now: float) -> float:
        if self.rules.interval == "push_to_push":
            return (self.push_times[w][-1] if self.push_times[w] else self.first_grant) + self.interval(w)
        return (self.granted_at[w] if w in self.computing else now) + self.interval(w)

    def ask(self, p: int, now: float) -> int:
        slowest = max(
            (w for w in self.active if self.t[w] == self.min()), key=lambda w: (self.expected(w, now), -w)
        )
        if not self.push_times[slowest]:
            return 0
        return all_pairs_extension(
            self.push_times[p][-1],
            self.interval(p),
            self.expected(slowest, now),
            self.interval(slowest),
            self.rules.r_max,
            now,
            self.rules.late == "clamp",
        )

    def cap_is_open(self, p: int) -> bool:
        if self.rules.cap == "run_ahead":
            return self.run_ahead(p) <= self.rules.s_upper
        return self.rules.cap == "none" or self.lead(p) <= self.rules.s_upper

    def start(self, now: float) -> Outcome:
        self.computing = set(self.active)
        self.granted_at = [now] * len(self.t)
        self.first_grant = now
        decisions = [(w, Cause.START, now, 0, 0, 0, now, 0) for w in sorted(self.active)]
        return Outcome(releases=tuple(decisions))  # type: ignore[arg-type]

    def on_pushes(self, pushes: list[Push], now: float) -> Outcome:
        pushes = sorted(pushes)
        ignored = tuple(push.worker for push in pushes if push.worker not in self.active)
        pushes = [push for push in pushes if push.worker in self.active]
        waiting = set(self.held_since)
        low = self.min()
        if any(self.t[push.worker] == low for push in pushes) and self.rules.release == "next_push":
            self.permit |= waiting
        for p, at, _, _ in pushes:
            at = min(max(at, self.granted_at[p]), now)
            self.t[p] += 1
            self.processing[p] = at - self.granted_at[p]
            self.push_times[p].append(at)
            for j in self.computing:
                self.ahead[p][j] += 1
        for p, _, is_last, has_gradient in pushes:
            self.computing.discard(p)
            self.round_pushed.add(p)
            if has_gradient:
                self.round_gradients.add(p)
            if is_last:
                self.active.discard(p)
            else:
                self.held_since[p] = now
        for p in sorted(self.held_since.keys() - waiting):
            if self.lead(p) <= self.rules.s_lower or self.extension[p] > 0:
                self.permit.add(p)
            elif self.rules.r_max and (
                self.rules.ask == "any" or self.t[p] == max(self.t[w] for w in self.active)
            ):
                r = self.ask(p, now)
                if r > 0:
                    self.permit.add(p)
                    self.extension[p] = r + (self.rules.grant == "literal")
        return self.settle(now, [push for push in pushes if push.has_gradient], waiting, ignored)

    def leave(self, workers: list[int], now: float, *, lost: bool) -> Outcome:
        waiting = set(self.held_since)
        for w in set(workers) & self.active:
            self.active.discard(w)
            self.computing.discard(w)
            self.held_since.pop(w, None)
            self.permit.discard(w)
            if lost:
                self.round_gradients.discard(w)
        return self.settle(now, [], waiting, ())

    def on_finish(self, workers: list[int], now: float) -> Outcome:
        return self.leave(workers, now, lost=False)

    def on_failure(self, workers: list[int], now: float) -> Outcome:
        return self.leave(workers, now, lost=True)

    def settle(
        self, now: float, gradients: list[Push], waiting: set[int], ignored: tuple[int, ...]
    ) -> Outcome:
        apply = tuple(push.worker for push in gradients)
        if self.rules.apply == "per_round":
            apply = ()
            if self.active <= self.round_pushed:
                apply = tuple(sorted(self.round_gradients))
                self.round_gradients.clear()
                self.round_pushed.clear()
        self.permit |= {p for p in self.held_since if self.lead(p) <= self.rules.s_lower}
        goes_on = [p for p in sorted(self.held_since) if p in self.permit and self.cap_is_open(p)]
        releases, holds = [], []
        for p in sorted(self.held_since):
            lead, run_ahead = self.lead(p), self.run_ahead(p)
            if p in goes_on:
                if lead <= self.rules.s_lower:
                    cause, self.extension[p] = Cause.LEAD, 0
                elif self.extension[p]:
                    cause, self.extension[p] = Cause.EXTENSION, self.extension[p] - 1
                else:
                    cause = Cause.AWAITED_PUSH
                since, left = self.held_since[p], self.extension[p]
                releases.append((p, cause, now, self.t[p], lead, run_ahead, since, left))
            elif p not in waiting:
                cause = Cause.HELD_BY_CAP if p in self.permit else Cause.HELD_BY_RULE
                holds.append((p, cause, now, self.t[p], lead, run_ahead, now, self.extension[p]))
        for p in goes_on:
            del self.held_since[p]
            self.permit.discard(p)
            self.computing.add(p)
            self.granted_at[p] = now
            for q in range(len(self.t)):
                self.ahead[q][p] = 0
        return Outcome(apply, tuple(releases), tuple(holds), ignored)  # type: ignore[arg-type]


def all_pairs_extension(
    latest: float, interval: float, first: float, slowest_interval: float, r_max: int, now: float, clamp: bool
) -> int:
    """Algorithm 2 over all pairs (r, k)."""
    if interval <= 0 or (clamp and first < now):
        return 0
    step = max(slowest_interval, 0.0)
    distance = {
        (r, k): abs((first + k * step) - (latest + r * interval))
        for r in range(r_max + 1)
        for k in range(r_max + 1)
    }
    tolerance = 1e-9 * max(interval, slowest_interval) + 4 * r_max * math.ulp(now)
    bound = min(distance.values()) + tolerance
    return min(r for (r, _), value in distance.items() if value <= bound)


def in_short(outcome: Outcome) -> tuple[Any, ...]:
    """An outcome without the details of its reasons."""
    return (
        outcome.apply,
        tuple(tuple(decision)[:8] for decision in outcome.releases),
        tuple(tuple(decision)[:8] for decision in outcome.holds),
        outcome.ignored,
    )
