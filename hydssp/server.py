"""The server's loop: receive pushes, update the weights, publish them, grant.

One job: carry out what the coordinator decides. It decides nothing about who may run ahead, and knows neither MPI nor
Hydra nor torch nor any paradigm. Between two entries into the transport it works on a bounded number of elements,
because on several MPI libraries the workers' puts and gets stand still while the server is silent. Time comes from the
transport.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hydssp.coordination.coordinator import Coordinator
from hydssp.coordination.events import Decision, Outcome, Push
from hydssp.coordination.ranges import Dealer
from hydssp.errors import TrainingError
from hydssp.evaluator import Evaluation, Evaluator, Request
from hydssp.transport.backoff import Backoff
from hydssp.transport.messages import Grant, Pushed
from hydssp.transport.protocol import ServerTransport
from hydssp.update.schedule import LrClock, Schedule, schedule_epoch
from hydssp.update.updater import Contribution, Effect, Updater

if TYPE_CHECKING:
    from hydssp.update.buffers import WorkersBuffers

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """When a run ends besides running out of epochs; None: no such limit.

    Attributes:
        max_updates: Updates.
        max_time_s: Seconds from the start of training.
        target_accuracy: Of an evaluation, 0..1.
        rejected_in_a_row: Gradients that are not finite, one after the other, after which the run is given up.
        stall_s: Seconds that a worker may compute on one gradient before the run is given up.
    """

    max_updates: int | None = None
    max_time_s: float | None = None
    target_accuracy: float | None = None
    rejected_in_a_row: int = 100
    stall_s: float | None = None


@dataclass(frozen=True)
class StepRule:
    """How pushes become a step: the learning rate and the gradients' weights.

    Attributes:
        schedule: Factor on the learning rate over the epochs.
        lr_clock: What drives the schedule.
        push_weight: Factor on the learning rate of a step made from single pushes (1/P or 1); rounds have 1.
        is_mean: True for rounds: the sample-weighted mean of the gradients; False: their sum.
        batch_size: Samples of a full push.
        num_samples: Size of the training data.
    """

    schedule: Schedule
    lr_clock: LrClock
    push_weight: float
    is_mean: bool
    batch_size: int
    num_samples: int

    def weights(self, samples: Sequence[int]) -> list[float]:
        """The weight of each gradient in an update, from the samples behind it."""
        if self.is_mean:
            total = sum(samples)
            return [count / total for count in samples]
        return [1.0] * len(samples)


class Recorder(Protocol):
    """What the server tells; see ``observe.recorder``, which writes it down."""

    def push(
        self,
        group: int,
        pushed: Pushed,
        now: float,
        *,
        lead: int,
        run_ahead: int,
        disposition: str,
        is_last: bool,
        has_gradient: bool,
    ) -> None:
        """One clock message was handled, in the ``group``-th call of the coordinator."""

    def update(
        self,
        now: float,
        version: int,
        applied: list[tuple[int, int, int]],
        lr: float,
        apply_s: float,
        effects: Sequence[Effect],
    ) -> None:
        """An update was made from ``(worker, staleness, samples)``, with what is known of each (or nothing)."""

    def release(self, decision: Decision, grant: Grant, now: float) -> None:
        """A worker goes on."""

    def hold(self, decision: Decision, now: float) -> None:
        """A worker waits."""

    def finish(self, workers: Sequence[int], now: float, why: str) -> None:
        """Workers have left."""

    def failure(self, worker: int, now: float, why: str) -> None:
        """A worker is lost."""

    def evaluation(
        self, now: float, version: int, samples: int, accuracy: float, loss: float, pinned_at: float
    ) -> None:
        """An evaluation's result is there."""

    def busy(self, seconds: float) -> None:
        """Time spent on work, for the share of time the server is busy."""

    def tick(self, now: float) -> None:
        """Called often; writes a progress record when one is due."""


class Server:
    """The parameter server between its transport, the coordinator and the optimizer.

    Args:
        transport: The server's end.
        coordinator: Holds every clock; decides.
        dealer: Deals batch ranges with the grants.
        optimizer: Updates the weight vector in place.
        step_rule: Learning rate and weights of an update.
        evaluator: Where weights are evaluated; None: nowhere.
        evaluate_every: Samples between two evaluations.
        recorder: Told of everything.
        limits: When to end early.
        buffers: The workers' buffers; None: the model has none.
        encode: ``encode(out, values)`` writes a stretch of the weights as they travel.
        stop_code: The exit code that a signal to this rank wants, 0 for none.
        describe: Words for a worker, with rank and host.

    Attributes:
        version: Updates made so far; equals the newest published version.
        samples: Samples behind these updates.
        ended_by: Why no further iteration is granted ("" while training goes on).
        exit_code: 0, or what a signal asked for.
        evaluations_skipped: Evaluations left out because the one before took longer than until the next was due.

    Raises:
        TrainingError: From ``step``, when a limit of ``limits`` is passed that means failure.
    """

    def __init__(
        self,
        *,
        transport: ServerTransport,
        coordinator: Coordinator,
        dealer: Dealer,
        optimizer: Updater,
        step_rule: StepRule,
        evaluator: Evaluator | None,
        evaluate_every: float,
        recorder: Recorder,
        limits: Limits,
        buffers: WorkersBuffers | None = None,
        encode: Callable[[np.ndarray, np.ndarray], None] = np.copyto,
        stop_code: Callable[[], int] = lambda: 0,
        describe: Callable[[int], str] = "worker {}".format,
    ) -> None:
        self.version = 0
        self.samples = 0
        self.ended_by = ""
        self.exit_code = 0
        self.evaluations_skipped = 0
        self._transport = transport
        self._coordinator = coordinator
        self._dealer = dealer
        self._optimizer = optimizer
        self._weights = optimizer.values
        self._rule = step_rule
        self._evaluator = evaluator
        self._evaluate_every = evaluate_every
        self._evaluate_at = evaluate_every
        self._recorder = recorder
        self._limits = limits
        self._buffers = buffers
        self._encode = encode
        self._stop_code = stop_code
        self._describe = describe
        self._rejected_in_a_row = 0
        self._num_gradients = self._num_skipped = self._num_rejected = 0
        self._granted_at = [0.0] * transport.num_workers
        self._look_for_stalls_at = 0.0
        self._pinned_version = -1
        self._updated_at = 0.0
        self._started_at = 0.0
        self._group = 0
        self._iterations = [0] * transport.num_workers
        self._pushed: dict[int, Pushed] = {}

    def start(self) -> None:
        """Publish the initial weights as version 0 and grant every worker its first iteration."""
        self._started_at = self._transport.now()
        self._publish_whole()
        self._carry_out(self._coordinator.start(self._transport.now()))

    @property
    def is_done(self) -> bool:
        """Every worker has left."""
        return self._coordinator.num_active == 0

    def step(self) -> bool:
        """Handle what has arrived. Returns whether there was anything to do."""
        pushed = self._transport.receive()
        now = self._transport.now()
        self._check_limits(now)
        if code := self._stop_code():
            self._end("a signal", code)
        self._poll_evaluation(now)
        self._recorder.tick(now)
        if pushed:
            self._handle(pushed, now)
        self._look_for_stalls(now)
        if not pushed:
            return False
        self._recorder.busy(self._transport.now() - now)
        return True

    def check_learned(self) -> None:
        """Called when training has ended.

        Raises:
            TrainingError: When most of the gradients were refused, or no update was made of those that came.
        """
        taken, refused, skipped = self._num_gradients, self._num_rejected, self._num_skipped
        if refused > taken or (skipped and not self.version):
            raise TrainingError(
                f"the run has not learned from most of its samples: {refused} gradients were not finite and {skipped} "
                f"were skipped by the loss scale, {taken} made {self.version} updates; lower optimizer.lr or set "
                "clip.norm"
            )

    def fail(self, workers: Sequence[int], why: str) -> None:
        """Go on without ``workers``, which are lost; the batches that they were granted are not dealt again."""
        now = self._transport.now()
        outcome = self._coordinator.on_failure(workers, now)
        for worker in workers:
            self._recorder.failure(worker, now, why)
        self._carry_out(outcome)

    def _handle(self, pushed: list[Pushed], now: float) -> None:
        self._group += 1
        events = []
        for p in pushed:
            self._pushed[p.worker] = p
            if p.clock.stop_code:
                self._end(f"a signal to {self._describe(p.worker)}", p.clock.stop_code)
        for p in pushed:
            has_gradient = p.clock.samples > 0 and p.clock.is_finite and not self.ended_by
            if has_gradient and self._buffers is not None:
                self._buffers.update(p.worker, self._transport.buffers(p.worker))
            self._num_gradients += has_gradient
            self._num_skipped += p.clock.is_skipped
            is_last = bool(self.ended_by) or not self._dealer.has_more(p.worker)
            events.append(Push(p.worker, p.pushed_at, is_last, has_gradient))
        outcome = self._coordinator.on_pushes(events, now)
        for p, event in zip(pushed, events, strict=True):
            self._recorder.push(
                self._group,
                p,
                now,
                lead=self._coordinator.lead(p.worker),
                run_ahead=self._coordinator.run_ahead(p.worker),
                disposition=self._disposition(p, event),
                is_last=event.is_last,
                has_gradient=event.has_gradient,
            )
        for p in pushed:
            if p.clock.samples > 0 and not p.clock.is_skipped:
                self._count_rejected(p)
        left = [event.worker for event in events if event.is_last]
        self._carry_out(outcome)
        self._stop(left)
        self._recorder.finish(left, self._transport.now(), self.ended_by or "epochs")

    def _count_rejected(self, pushed: Pushed) -> None:
        if pushed.clock.is_finite:
            self._rejected_in_a_row = 0
            return
        self._rejected_in_a_row += 1
        self._num_rejected += 1
        limit = self._limits.rejected_in_a_row
        who, clock = self._describe(pushed.worker), pushed.clock
        _log.warning(
            "refused the gradient of %s, iteration %d, version %d: it is not finite (loss %g)",
            who, clock.iteration, clock.version, clock.loss,
        )  # fmt: skip
        if self._rejected_in_a_row >= limit:
            hint = (
                "; its loss was finite: where wire.push or precision is fp16, which ends at 65504, use bf16"
            )
            raise TrainingError(
                f"{self._rejected_in_a_row} gradients in a row were not finite, the last one from {who}, iteration "
                f"{clock.iteration}; lower optimizer.lr, set clip.norm, or let more of them pass (nonfinite=reject and "
                f"a nonfinite_limit above {limit}){hint if math.isfinite(clock.loss) else ''}"
            )

    def _disposition(self, pushed: Pushed, event: Push) -> str:
        if event.has_gradient:
            return "gradient"
        if pushed.clock.samples == 0:
            return "empty"
        if pushed.clock.is_skipped:
            return "skipped"
        return "rejected" if not pushed.clock.is_finite else "discarded"

    def _carry_out(self, outcome: Outcome) -> None:
        """Apply, then release; workers for which nothing is left to do finish, which may release others."""
        while True:
            if outcome.apply:
                self._apply(outcome.apply)
            now = self._transport.now()
            for decision in outcome.holds:
                self._recorder.hold(decision, now)
            self._check_limits(now)
            idle = self._grant(outcome.releases)
            # Held workers are looked through only when what was just dealt may have been the last.
            if self.ended_by or (outcome.releases and not self._dealer.has_more(outcome.releases[0].worker)):
                idle += [
                    w
                    for w in self._coordinator.held
                    if w not in idle and (self.ended_by or not self._dealer.has_more(w))
                ]
            if not idle:
                return
            now = self._transport.now()
            self._stop(idle)
            self._recorder.finish(idle, now, self.ended_by or "epochs")
            outcome = self._coordinator.on_finish(sorted(idle), now)

    def _grant(self, releases: Sequence[Decision]) -> list[int]:
        """Grant each release its batch range; returns the workers for whom none is left."""
        workers = [decision.worker for decision in releases]
        if self.ended_by or not workers:
            return workers
        idle = []
        batches = self._dealer.deal(workers)
        for decision in releases:
            worker = decision.worker
            batch = batches[worker]
            if batch is None:
                idle.append(worker)
                continue
            grant = Grant(
                self._iterations[worker],
                self.version,
                batch.epoch,
                batch.start,
                batch.count,
                lr_factor=self._rule.schedule.factor(self._schedule_epoch(self._iterations[worker])),
            )
            if (following := self._dealer.upcoming(worker)) is not None:
                grant = replace(
                    grant, next_epoch=following.epoch, next_start=following.start, next_count=following.count
                )
            self._iterations[worker] += 1
            self._optimizer.granted(worker)
            self._transport.grant(worker, grant)
            self._granted_at[worker] = self._transport.now()
            self._recorder.release(decision, grant, self._granted_at[worker])
        return idle

    def _stop(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self._transport.grant(worker, Grant(self._iterations[worker], self.version, stop=True))

    def _apply(self, workers: Sequence[int]) -> None:
        """One update from the gradients of ``workers``, published as the next version."""
        began_at = self._transport.now()
        clocks = [self._pushed[w].clock for w in workers]
        counts = [clock.samples for clock in clocks]
        staleness = [self.version - clock.version for clock in clocks]
        epoch = self._schedule_epoch(max(clock.iteration for clock in clocks))
        slot = self._transport.begin_publish(self.version + 1)

        def publish_chunk(start: int, stop: int) -> None:
            self._encode(slot[start:stop], self._weights[start:stop])
            self._transport.progress()

        effects = self._optimizer.step(
            [
                Contribution(w, self._transport.gradient(w), weight, stale)
                for w, weight, stale in zip(workers, self._rule.weights(counts), staleness, strict=True)
            ],
            self._rule.schedule.factor(epoch) * self._rule.push_weight,
            publish_chunk,
        )
        self._transport.end_publish()
        self.version += 1
        self.samples += sum(counts)
        self._updated_at = now = self._transport.now()
        self._recorder.update(
            now,
            self.version,
            list(zip(workers, staleness, counts, strict=True)),
            self._optimizer.learning_rate,
            now - began_at,
            effects,
        )
        if self.samples >= self._evaluate_at and self._evaluator is not None and not self._evaluator.is_busy:
            self.pin_for_evaluation()

    def _schedule_epoch(self, worker_clock: int) -> float:
        """Where in the schedule training is now, as seen by a worker that has made so many pushes."""
        return schedule_epoch(
            self._rule.lr_clock,
            samples=self.samples,
            updates=self.version,
            worker_clock=worker_clock,
            batch_size=self._rule.batch_size,
            num_workers=self._transport.num_workers,
            num_samples=self._rule.num_samples,
        )

    def _publish_whole(self) -> None:
        slot = self._transport.begin_publish(self.version)
        self._copy_weights(slot, self._encode)
        self._transport.end_publish()

    def _is_finite(self, vector: np.ndarray) -> bool:
        step = self._optimizer.chunk_numel
        is_finite = True
        for start in range(0, len(vector), step):
            is_finite = is_finite and bool(np.isfinite(vector[start : start + step]).all())
            self._transport.progress()
        return is_finite

    def _copy_weights(
        self, out: np.ndarray, copy: Callable[[np.ndarray, np.ndarray], None] = np.copyto
    ) -> None:
        step = self._optimizer.chunk_numel
        for start in range(0, len(out), step):
            copy(out[start : start + step], self._weights[start : start + step])
            self._transport.progress()

    def combined_buffers(self) -> np.ndarray:
        """The buffers as they would be evaluated now, float64; empty where the model has none."""
        return self._buffers.combined() if self._buffers is not None else np.empty(0)

    def pin_for_evaluation(self) -> None:
        """Copy the weights as they are to the evaluator, which must not be busy."""
        assert self._evaluator is not None
        self._pinned_version = self.version
        pinned = self._evaluator.submit(Request(self.version, self._updated_at, self.samples))
        self._copy_weights(pinned.weights)
        pinned.buffers[:] = self.combined_buffers()
        if not self._is_finite(pinned.weights):
            raise TrainingError(
                f"the weights are not finite any more at version {self.version}; lower optimizer.lr or set clip.norm"
            )
        self._evaluator.begin()
        num_due = 0
        while self._evaluate_at <= self.samples:
            self._evaluate_at += self._evaluate_every
            num_due += 1
        self.evaluations_skipped += max(0, num_due - 1)

    def evaluate_final(self) -> None:
        """Wait for the results that are missing, the final weights' last; nobody is held up by it any more."""
        if self._evaluator is None:
            return
        self._evaluator.training_ended()
        is_pinned = self._pinned_version == self.version
        while not is_pinned or self._evaluator.num_pending:
            now = self._transport.now()
            self._poll_evaluation(now)
            if not is_pinned and not self._evaluator.is_busy:
                self.pin_for_evaluation()
                is_pinned = True
            time.sleep(2e-3)

    def _poll_evaluation(self, now: float) -> None:
        if self._evaluator is not None and (result := self._evaluator.poll()) is not None:
            self._record_evaluation(result, now)

    def _record_evaluation(self, result: Evaluation, now: float) -> None:
        request = result.request
        self._recorder.evaluation(
            now, request.version, request.samples, result.accuracy, result.loss, request.pinned_at
        )
        target = self._limits.target_accuracy
        if target is not None and result.accuracy >= target:
            self._end("target_accuracy")

    def _check_limits(self, now: float) -> None:
        limits = self._limits
        if limits.max_updates is not None and self.version >= limits.max_updates:
            self._end("max_updates")
        elif limits.max_time_s is not None and now - self._started_at >= limits.max_time_s:
            self._end("max_time_s")

    def _look_for_stalls(self, now: float) -> None:
        limit = self._limits.stall_s
        if limit is None or now < self._look_for_stalls_at:
            return
        self._look_for_stalls_at = now + min(1.0, limit / 10)
        missing = [w for w in self._coordinator.computing if now - self._granted_at[w] > limit]
        if missing:
            told = "\n".join(self._last_heard(w, now) for w in missing[:16])
            more = f"\n  and {len(missing) - 16} more" if len(missing) > 16 else ""
            raise TrainingError(
                f"no push for more than stall_limit_s={limit:g} s from\n{told}{more}\n"
                "If an iteration may take that long, raise stall_limit_s"
            )

    def _last_heard(self, worker: int, now: float) -> str:
        last = self._pushed.get(worker)
        before = (
            f"before that it pushed iteration {last.clock.iteration} (computed {last.clock.compute_s:.3g} s) at "
            f"{last.pushed_at:.1f} s"
            if last is not None
            else "it has never pushed"
        )
        return (
            f"  {self._describe(worker)}: granted iteration {self._iterations[worker] - 1} at "
            f"{self._granted_at[worker]:.1f} s, {now - self._granted_at[worker]:.0f} s ago; {before}"
        )

    def _end(self, why: str, exit_code: int = 0) -> None:
        """Grant nothing more. Workers that compute are drained, their gradients not applied."""
        if not self.ended_by:
            self.ended_by, self.exit_code = why, exit_code


def run(server: Server, backoff: Backoff) -> None:
    """Drive the server until every worker has left, sleeping whenever nothing has arrived."""
    server.start()
    while not server.is_done:
        if server.step():
            backoff.reset()
        else:
            backoff.wait()
