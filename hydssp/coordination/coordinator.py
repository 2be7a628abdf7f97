"""The coordinator: takes pushes, finishes and failures, and says who goes on.

Pure decisions with one release rule for every paradigm: reads no clock (time is an argument), draws no random
number, sends nothing, knows no gradient and no paradigm's name. The rules are those of ``paradigms.Rules``;
what DSSP adds is from Zhao et al. (ICDCS 2019).

The release rule has two gates. A worker goes on when it has a permit and the cap is open:

=======  =============================================================================================
permit   its lead is within s_lower; or it has an extension; or (release next_push) a worker whose clock
         was min(t) has pushed since it was held. Lasts until the grant.
cap      run_ahead: its pushes since the oldest grant of a computing worker are at most s_upper;
         lead: its lead is at most s_upper; none: always open. Gates every grant but the first.
=======  =============================================================================================

Both are tested for a worker when it pushes and, while it is held, after every push, finish and failure. All
pushes that arrived together are counted first, then everyone is decided on, then released in worker order.

Nobody can wait for ever, whatever the switches: if no worker computes, no run-ahead is counted, and a worker
at min(t) has lead 0; it has a permit and an open cap.

Cost per push is O(log P). A gate that is closed for a worker opens when one number reaches the worker's key:
min(t) for a lead, the oldest computing grant for a run-ahead. So held workers wait in heaps by that key and
only those that go on are touched.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from hydssp.coordination.controller import extension
from hydssp.coordination.events import Cause, Decision, Outcome, ProtocolError, Push
from hydssp.coordination.paradigms import Paradigm, Rules
from hydssp.errors import UserError

_ALWAYS_OPEN = -1


class Coordinator:
    """All clocks and waits of one run.

    Changed only by ``start``, ``on_pushes``, ``on_finish`` and ``on_failure``.
    Events must come in order of time. An event that raises leaves the state as it was.
    """

    def __init__(self, paradigm: Paradigm | Rules, num_workers: int) -> None:
        """Nobody computes before ``start``.

        Args:
            paradigm: A paradigm, or its rules.
            num_workers: Number of workers P, >= 1.

        Raises:
            UserError: If there is no worker.
        """
        if num_workers < 1:
            raise UserError(f"num_workers={num_workers}: must be an integer >= 1; start at least one worker")
        rules = paradigm if isinstance(paradigm, Rules) else paradigm.rules
        self.rules = rules
        self.num_workers = num_workers

        # The switches, read once.
        self._s_lower = rules.s_lower
        self._r_max = rules.r_max
        self._surplus = 1 if rules.grant == "literal" else 0
        self._releases_on_push = rules.release == "next_push"
        self._only_fastest_asks = rules.ask == "fastest"
        self._caps_run_ahead = rules.cap == "run_ahead" and rules.s_upper != math.inf
        self._caps_lead = rules.cap == "lead" and rules.s_upper != math.inf
        self._clamps_late = rules.late == "clamp"
        self._by_processing = rules.interval == "processing"
        self._is_per_round = rules.apply == "per_round"
        # A deque index: the (s_upper+1)-th last push.
        self._capping_push = -int(rules.s_upper) - 1 if self._caps_run_ahead else 0
        self._lead_details: tuple[tuple[str, float], ...] = (("s_lower", rules.s_lower),)

        # Time and order. Events are numbered, and a push or grant has the number of its event: a push with a
        # number above that of a grant came after it.
        self._now = -math.inf
        self._event = 0
        self._is_started = False

        # Per worker.
        self._clocks = [0] * num_workers
        self._is_active = [True] * num_workers
        self._granted_at = [0.0] * num_workers
        self._pushed_at = [0.0] * num_workers
        self._interval = [0.0] * num_workers
        self._extension = [0] * num_workers
        self._recent_pushes: list[deque[int]] = [deque() for _ in range(num_workers)]
        """Event numbers of a worker's pushes; those up to the oldest computing grant are dropped at its next
        push."""

        # The active workers. Ordered by grant, because the oldest grant decides the run-ahead.
        self._computing: OrderedDict[int, int] = OrderedDict()  # worker -> event number of its grant
        self._held: dict[int, float] = {}  # worker -> since when
        self._at_clock: dict[int, set[int]] = {0: set(range(num_workers))}
        self._num_active = num_workers
        self._min = 0
        self._max = 0

        # Heaps of (key, worker); a worker that has left is skipped when it comes to the top.
        self._held_by_rule: list[tuple[int, int]] = []  # without a permit; key is t - s_lower
        self._held_by_cap: list[tuple[int, int]] = []  # with a permit; key see _cap_key

        # When the workers at min(t) are expected to push, last one first: made when first asked for at this
        # min(t).
        self._due_clock = -1
        self._due: list[tuple[float, int]] = []  # (-expected time, worker)
        self._due_held: list[tuple[float, int]] = []  # (-interval, worker) for those that wait for a grant

        # The round under way, for apply per_round.
        self._pending: set[int] = set()
        self._round = 0

        self.num_pushes = 0
        """Pushes counted: the sum of all clocks."""
        self.num_finished = 0
        self.num_failed = 0
        self.num_ignored_pushes = 0
        """Pushes of workers that were not active any more."""
        self.num_controller_calls = 0
        self.extension_histogram: dict[int, int] = {}
        """Answer of the controller -> how often."""
        self.num_nonpositive_intervals = 0
        """Controller calls for a worker whose last interval was not positive, which gives no extension."""
        self.lead_max = 0
        """Largest lead right after a push."""
        self.lead_max_at_start = 0
        """Largest lead at a grant."""
        self.run_ahead_max = 0
        """Largest run-ahead right after a push."""

    # --- events --------------------------------------------------------------------------------------------

    def start(self, now: float) -> Outcome:
        """Grant every active worker its first iteration.

        Args:
            now: Seconds from the start of the run.

        Raises:
            ProtocolError: If called a second time.
            ValueError: If ``now`` is not finite.
        """
        if self._is_started:
            raise ProtocolError("the coordinator has started already")
        self._check_time(now)
        self._is_started = True
        self._now = now
        self._event = 1
        releases = []
        for worker in self.active:
            self._computing[worker] = 1
            self._granted_at[worker] = self._pushed_at[worker] = now
            releases.append(Decision(worker, Cause.START, now, 0, 0, 0, now))
        return Outcome(releases=tuple(releases))

    def on_pushes(self, pushes: Iterable[Push], now: float) -> Outcome:
        """Count pushes that arrived together and decide who goes on.

        Args:
            pushes: At most one per worker, in any order. ``at`` is moved into the time from the worker's
                grant to ``now`` if it lies outside.
            now: Time of the decision, seconds from the start of the run.

        Returns:
            What to apply and whom to release. Pushes of workers that are not active are ignored and named.

        Raises:
            ProtocolError: If a worker pushes without a grant, twice, or does not exist.
            ValueError: If ``now`` lies before the last event or is not finite.
        """
        counted, ignored = self._check_pushes(pushes)
        self._check_time(now)
        self._now = now
        self._event += 1
        self.num_ignored_pushes += len(ignored)
        has_awaited = self._count(counted, now)
        goes_on = self._freed(has_awaited)
        holds = self._decide(counted, now, goes_on)
        if self._is_per_round:
            self._pending.update([push[0] for push in counted if push[3]])
            to_apply = self._completed_round()
        else:
            to_apply = tuple([push[0] for push in counted if push[3]])
        return Outcome(to_apply, self._grant(goes_on, now), holds, ignored)

    def on_finish(self, workers: Iterable[int], now: float) -> Outcome:
        """Workers leave in good order, computing or held; what they pushed still counts.

        Args:
            workers: Who leaves; those that are not active any more are skipped.
            now: Seconds from the start of the run.

        Raises:
            ProtocolError: If a worker does not exist.
            ValueError: If ``now`` lies before the last event or is not finite.
        """
        left = self._leave(workers, now)
        self.num_finished += len(left)
        return self._after_leaving(now)

    def on_failure(self, workers: Iterable[int], now: float) -> Outcome:
        """Workers are lost (failed or evicted); their gradients of a round that is not complete are dropped.

        Args:
            workers: Who is lost; those that are not active any more are skipped.
            now: Seconds from the start of the run.

        Raises:
            ProtocolError: If a worker does not exist.
            ValueError: If ``now`` lies before the last event or is not finite.
        """
        left = self._leave(workers, now)
        self.num_failed += len(left)
        self._pending.difference_update(left)
        return self._after_leaving(now)

    # --- questions -----------------------------------------------------------------------------------------

    @property
    def clocks(self) -> tuple[int, ...]:
        """Pushes counted, by worker; those of workers that have left stay as they were."""
        return tuple(self._clocks)

    @property
    def min_clock(self) -> int:
        """min(t) over the active workers; its last value when nobody is active."""
        return self._min

    @property
    def max_clock(self) -> int:
        """max(t) over the active workers; its last value when nobody is active."""
        return self._max

    @property
    def active(self) -> tuple[int, ...]:
        """Workers that have not finished and not failed, in worker order."""
        return tuple([worker for worker in range(self.num_workers) if self._is_active[worker]])

    @property
    def num_active(self) -> int:
        """How many workers are active."""
        return self._num_active

    @property
    def held(self) -> tuple[int, ...]:
        """Workers that wait for a grant, in worker order."""
        return tuple(sorted(self._held))

    @property
    def computing(self) -> tuple[int, ...]:
        """Workers that were granted and have not pushed yet, oldest grant first."""
        return tuple(self._computing)

    @property
    def controller_figures(self) -> dict[str, object]:
        """``calls`` of the controller, and ``extension_histogram``: its answer as text -> how often."""
        histogram = {str(r): count for r, count in sorted(self.extension_histogram.items())}
        return {"calls": self.num_controller_calls, "extension_histogram": histogram}

    def lead(self, worker: int) -> int:
        """Clock of ``worker`` minus min(t); 0 for a worker that is not active."""
        return self._clocks[worker] - self._min if self._is_active[worker] else 0

    def run_ahead(self, worker: int) -> int:
        """Pushes of ``worker`` since the oldest grant of a computing worker; 0 if it is not active."""
        if not self._is_active[worker]:
            return 0
        oldest = self._oldest_grant()
        recent = self._recent_pushes[worker]
        return len(recent) - bisect_right(recent, oldest)

    # --- one event, step by step ---------------------------------------------------------------------------

    def _check_time(self, now: float) -> None:
        if not self._now <= now < math.inf:
            raise ValueError(f"now={now} s: must be finite and not before the last event ({self._now} s)")

    def _check_pushes(self, pushes: Iterable[Push]) -> tuple[list[Push], tuple[int, ...]]:
        """The pushes to count, in worker order, and the workers whose push is ignored."""
        ordered = list(pushes)
        if len(ordered) > 1:
            ordered.sort(key=_worker_of)
        computing = self._computing
        counted = []
        ignored: tuple[int, ...] = ()
        previous = None
        for push in ordered:
            worker = push[0]
            if worker == previous:
                raise ProtocolError(f"worker {worker} pushed twice in one event")
            previous = worker
            if worker in computing:
                counted.append(push)
                continue
            self._check_worker(worker)
            if self._is_active[worker]:
                raise ProtocolError(f"worker {worker} pushed without a grant")
            ignored += (worker,)
        return counted, ignored

    def _check_worker(self, worker: int) -> None:
        if not 0 <= worker < self.num_workers:
            raise ProtocolError(f"worker {worker} does not exist: workers are 0 .. {self.num_workers - 1}")

    def _count(self, counted: Sequence[Push], now: float) -> bool:
        """Count pushes; returns whether one of them came from a worker at min(t), i.e. was awaited."""
        clocks, at_clock = self._clocks, self._at_clock
        low = self._min
        has_awaited = False
        for worker, at, is_last, _ in counted:
            del self._computing[worker]
            clock = clocks[worker]
            if clock == low:
                has_awaited = True
            granted_at = self._granted_at[worker]
            if not granted_at <= at <= now:
                at = granted_at if at < granted_at else now
            # Before its first push a worker's pushed_at is its first grant.
            since = granted_at if self._by_processing else self._pushed_at[worker]
            self._interval[worker] = at - since
            self._pushed_at[worker] = at
            self._recent_pushes[worker].append(self._event)
            self._remove_from_clock(worker, clock)
            clock += 1
            clocks[worker] = clock
            if is_last:
                self._is_active[worker] = False
                self._num_active -= 1
                self.num_finished += 1
            else:
                members = at_clock.get(clock)
                if members is None:
                    at_clock[clock] = {worker}
                else:
                    members.add(worker)
                if clock > self._max:
                    self._max = clock
        self.num_pushes += len(counted)
        self._move_ends()
        return has_awaited

    def _leave(self, workers: Iterable[int], now: float) -> set[int]:
        """Take workers out of the active set; returns those that were in it."""
        named = set(workers)
        for worker in named:
            self._check_worker(worker)
        self._check_time(now)
        self._now = now
        self._event += 1
        left = {worker for worker in named if self._is_active[worker]}
        for worker in left:
            self._is_active[worker] = False
            self._computing.pop(worker, None)
            self._held.pop(worker, None)
            self._remove_from_clock(worker, self._clocks[worker])
        self._num_active -= len(left)
        self._move_ends()
        return left

    def _after_leaving(self, now: float) -> Outcome:
        """The rest of a finish or failure: what no longer waits for those that left."""
        if not self._is_started:
            return Outcome()
        to_apply = self._completed_round() if self._is_per_round else ()
        return Outcome(to_apply, self._grant(self._freed(False), now))

    def _remove_from_clock(self, worker: int, clock: int) -> None:
        members = self._at_clock[clock]
        if len(members) == 1:
            del self._at_clock[clock]
        else:
            members.remove(worker)

    def _move_ends(self) -> None:
        """Move min(t) and max(t) to clocks that active workers have."""
        if self._num_active:
            at_clock = self._at_clock
            while self._min not in at_clock:
                self._min += 1
            while self._max not in at_clock:
                self._max -= 1

    def _completed_round(self) -> tuple[int, ...]:
        """The gradients of the round if every active worker has pushed in it, else none."""
        if self._min == self._round and self._num_active:
            return ()
        self._round = self._min
        to_apply = tuple(sorted(self._pending))
        self._pending.clear()
        return to_apply

    def _oldest_grant(self) -> int:
        """Event number of the oldest grant of a computing worker; if there is none, no push lies after it."""
        computing = self._computing
        return computing[next(iter(computing))] if computing else self._event

    def _cap_level(self) -> int:
        """The number that a worker's cap key is compared with: the cap is open for keys up to it."""
        if self._caps_run_ahead:
            return self._oldest_grant()
        return self._min

    def _cap_key(self, worker: int) -> int:
        """The cap level from which on the cap is open for ``worker``; fixed while it is held."""
        if self._caps_run_ahead:
            # Its run-ahead exceeds s_upper as long as the (s_upper+1)-th last push lies after the oldest
            # grant.
            pushes = self._recent_pushes[worker]
            return pushes[self._capping_push] if len(pushes) >= -self._capping_push else _ALWAYS_OPEN
        if self._caps_lead:
            return self._clocks[worker] - int(self.rules.s_upper)
        return _ALWAYS_OPEN

    def _freed(self, has_awaited: bool) -> list[int]:
        """Test every held worker again; returns those that go on, in no order.

        Args:
            has_awaited: Whether a worker at min(t) has pushed in this event.
        """
        goes_on: list[int] = []
        by_rule, by_cap = self._held_by_rule, self._held_by_cap
        if not by_rule and not by_cap:
            return goes_on
        level = self._cap_level()
        if has_awaited and self._releases_on_push:
            permitted = [worker for _, worker in by_rule]
            by_rule.clear()
        else:
            permitted = []
            while by_rule and by_rule[0][0] <= self._min:
                permitted.append(heappop(by_rule)[1])
        for worker in permitted:
            if self._is_active[worker]:
                key = self._cap_key(worker)
                if key <= level:
                    goes_on.append(worker)
                else:
                    heappush(by_cap, (key, worker))
        while by_cap and by_cap[0][0] <= level:
            worker = heappop(by_cap)[1]
            if self._is_active[worker]:
                goes_on.append(worker)
        return goes_on

    def _decide(self, counted: Sequence[Push], now: float, goes_on: list[int]) -> tuple[Decision, ...]:
        """Test the workers that have just pushed; appends to ``goes_on`` and returns the others' holds."""
        holds: tuple[Decision, ...] = ()
        oldest = self._oldest_grant()
        level = oldest if self._caps_run_ahead else self._min
        for push in counted:
            worker = push[0]
            recent = self._recent_pushes[worker]
            while recent and recent[0] <= oldest:
                recent.popleft()
            if len(recent) > self.run_ahead_max:
                self.run_ahead_max = len(recent)
            if push[2]:
                recent.clear()
                continue
            clock = self._clocks[worker]
            lead = clock - self._min
            if lead > self.lead_max:
                self.lead_max = lead
            is_asked = False
            is_permitted = lead <= self._s_lower or self._extension[worker] > 0
            may_ask = self._r_max > 0 and (clock == self._max or not self._only_fastest_asks)
            if not is_permitted and may_ask:
                is_asked = True
                is_permitted = self._ask(worker, now)
            if is_permitted:
                key = self._cap_key(worker)
                if key <= level:
                    goes_on.append(worker)
                else:
                    heappush(self._held_by_cap, (key, worker))
                    holds += (self._hold_by_cap(worker, lead, now),)
            else:
                # s_lower is finite here, or the lead would be within it.
                heappush(self._held_by_rule, (clock - int(self._s_lower), worker))
                holds += (self._hold_by_rule(worker, lead, is_asked, now),)
        return holds

    def _ask(self, worker: int, now: float) -> bool:
        """Ask the controller for an extension for ``worker``; returns whether it gives one."""
        interval = self._interval[worker]
        r = 0
        if interval <= 0:
            self.num_nonpositive_intervals += 1
        elif self._min > 0:  # else a slowest worker has not pushed yet and counts as due now
            slowest, expected_at = self._slowest(now)
            r = extension(
                self._pushed_at[worker],
                interval,
                expected_at,
                self._interval[slowest],
                self._r_max,
                now,
                self._clamps_late,
            )
        self.num_controller_calls += 1
        self.extension_histogram[r] = self.extension_histogram.get(r, 0) + 1
        if r == 0:
            return False
        self._extension[worker] = r + self._surplus
        return True

    def _slowest(self, now: float) -> tuple[int, float]:
        """The worker at min(t) whose next push is expected last, and when that is.

        min(t) rises only when all of them have pushed. Ties: the lowest worker.
        """
        low = self._min
        due, due_held = self._due, self._due_held
        if self._due_clock != low:
            self._due_clock = low
            due.clear()
            due_held.clear()
            for worker in self._at_clock[low]:
                if not self._by_processing:
                    due.append((-self._pushed_at[worker] - self._interval[worker], worker))
                elif worker in self._computing:
                    due.append((-self._granted_at[worker] - self._interval[worker], worker))
                else:
                    due_held.append((-self._interval[worker], worker))
            heapify(due)
            heapify(due_held)
        clocks, is_active = self._clocks, self._is_active
        while due:
            expected, worker = due[0]
            if clocks[worker] == low and is_active[worker]:
                break
            heappop(due)
        while due_held:
            interval, waiting = due_held[0]
            if clocks[waiting] == low and is_active[waiting] and waiting not in self._computing:
                if not due or (interval - now, waiting) < (expected, worker):
                    return waiting, now - interval
                break
            heappop(due_held)
        return worker, -expected

    def _hold_by_rule(self, worker: int, lead: int, is_asked: bool, now: float) -> Decision:
        self._held[worker] = now
        slowest, expected_at = self._slowest(now)
        details = (*self._lead_details, ("lead_over", slowest))
        if self._clocks[slowest] > 0:
            details += (("expected_at", expected_at),)
        if is_asked:
            details += (("is_asked", 1),)
        run_ahead = len(self._recent_pushes[worker])
        clock = self._clocks[worker]
        return Decision(worker, Cause.HELD_BY_RULE, now, clock, lead, run_ahead, now, 0, details)

    def _hold_by_cap(self, worker: int, lead: int, now: float) -> Decision:
        self._held[worker] = now
        if self._caps_run_ahead:
            what, over = "run_ahead_over", next(iter(self._computing))
            since = self._granted_at[over] if self._by_processing else self._pushed_at[over]
            expected_at = since + self._interval[over]
        else:
            what = "lead_over"
            over, expected_at = self._slowest(now)
        details: tuple[tuple[str, float], ...] = (("s_upper", self.rules.s_upper), (what, over))
        if self._clocks[over] > 0:
            details += (("expected_at", expected_at),)
        run_ahead = len(self._recent_pushes[worker])
        clock, left = self._clocks[worker], self._extension[worker]
        return Decision(worker, Cause.HELD_BY_CAP, now, clock, lead, run_ahead, now, left, details)

    def _grant(self, goes_on: list[int], now: float) -> tuple[Decision, ...]:
        """Grant the next iteration to ``goes_on``, in worker order."""
        if len(goes_on) > 1:
            goes_on.sort()
        releases = []
        oldest = self._oldest_grant()
        for worker in goes_on:
            clock = self._clocks[worker]
            lead = clock - self._min
            if lead <= self._s_lower:
                # Whatever is left of an extension is no longer needed; the controller would be asked afresh.
                self._extension[worker] = 0
                cause = Cause.LEAD
            elif self._extension[worker] > 0:
                self._extension[worker] -= 1
                cause = Cause.EXTENSION
            else:
                cause = Cause.AWAITED_PUSH
            if lead > self.lead_max_at_start:
                self.lead_max_at_start = lead
            recent = self._recent_pushes[worker]
            while recent and recent[0] <= oldest:
                recent.popleft()
            self._computing[worker] = self._event
            self._granted_at[worker] = now
            if clock == self._due_clock and self._by_processing:
                heappush(self._due, (-now - self._interval[worker], worker))
            releases.append(
                Decision(
                    worker,
                    cause,
                    now,
                    clock,
                    lead,
                    len(recent),
                    self._held.pop(worker, now),
                    self._extension[worker],
                    self._lead_details,
                )
            )
        return tuple(releases)

    # --- self-check ----------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check the state against what it must be, from scratch in O(P log P). For tests.

        Raises:
            AssertionError: If an invariant is broken.
        """
        active = set(self.active)
        assert len(active) == self._num_active
        computing, held = set(self._computing), set(self._held)
        assert not computing & held
        if not self._is_started:
            assert not computing
            assert not held
            return
        assert computing | held == active
        assert not active or computing, "nobody computes: the run would never go on"
        assert self.num_pushes == sum(self._clocks)

        by_clock: dict[int, set[int]] = {}
        for worker in active:
            by_clock.setdefault(self._clocks[worker], set()).add(worker)
        assert by_clock == self._at_clock
        if active:
            assert self._min == min(by_clock)
            assert self._max == max(by_clock)

        grants = list(self._computing.values())
        assert grants == sorted(grants)
        for pushes in self._recent_pushes:
            assert list(pushes) == sorted(pushes)
        by_rule = [entry for entry in self._held_by_rule if self._is_active[entry[1]]]
        by_cap = [entry for entry in self._held_by_cap if self._is_active[entry[1]]]
        assert sorted(worker for _, worker in by_rule + by_cap) == sorted(held), "held in one heap each"
        for key, worker in by_rule:
            assert key == self._clocks[worker] - self._s_lower
            assert key > self._min, "has a permit"
            assert self._extension[worker] == 0
        for key, worker in by_cap:
            assert key == self._cap_key(worker)
            assert key > self._cap_level(), "permit and open cap"
        if self._caps_run_ahead:
            assert all(self.run_ahead(worker) <= self.rules.s_upper + 1 for worker in active)
        if self._caps_lead:
            assert all(self.lead(worker) <= self.rules.s_upper + 1 for worker in active)
        if self._is_per_round and active:
            assert self._min == self._round
            assert all(self._clocks[worker] == self._round + 1 for worker in self._pending & active)


def _worker_of(push: Push) -> int:
    return push[0]
