"""All that the server tells about a run: one object that feeds the event log, metrics, console and summary.

Decides nothing and reads no clock: times are arguments, seconds on the server's clock. It lies on the
server's path, so a call costs microseconds; what takes longer (console, summary) happens in ``tick``, a few
times a second at most.

``events.jsonl``: one flat object a line, in the order in which the server did things, so that the log can be
replayed. Every record has ``e`` (its kind) and ``t`` (server time when it happened). ``w`` is a worker, 0 ..
P-1.

========== ==================================================================================================
e          further keys
========== ==================================================================================================
start      format (1), paradigm, seed, workers (P), and what the server gave to ``started``
push       g (number of the server's call that handled it; equal g: handled together), w, at (put
           finished), granted (the worker saw its grant), it (iteration), v (version read), n (samples), last,
           grad (has a gradient), lead, ahead (run-ahead), d (gradient | empty | rejected | skipped |
           discarded | ignored), loss, and the durations data, pull, compute, push in seconds
update     v (version made), w, stale, n (lists: worker, staleness and samples of each gradient in it), lr,
           apply_s; gap, penalty, penalty_max (lists, see ``Effect``; null where the mitigation does not
           know them)
release    w, cause, at, clock, lead, ahead, held_since, ext (extension left), it, v (version to pull),
           epoch, start, n (batch range), stop; reason, in words, only after a wait
hold       w, cause, at, clock, lead, ahead, held_since, ext, reason
finish     w (list), why
failure    w, why
end        status, reason
========== ==================================================================================================

``events=sample`` keeps every k-th push of each worker with the update and release that follow it, and all
holds whose cause is another than at the worker's hold before, with their release. Times are exact; durations
are rounded to 1 us.

``metrics.jsonl``: ``kind`` is ``progress`` (rates, loss, accuracy, staleness and leads since the record
before, the last one until the last worker left; clocks and held workers now, at most 64 of them; sums since
the start) or ``evaluation`` (``t``, ``pinned_at``: when the evaluated weights were the newest; ``version``,
``samples``, ``accuracy``, ``loss``).

``summary.json``: see ``Recorder.summary``.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from hydssp.errors import UserError
from hydssp.observe.jsonl import JsonLinesWriter, to_strict
from hydssp.observe.run_folder import RunFolder, write_atomically
from hydssp.observe.statistics import (
    IntHistogram,
    LogHistogram,
    Totals,
    WindowMean,
    WorkerStatistics,
    loss_window,
)

if TYPE_CHECKING:
    from hydssp.coordination.events import Decision
    from hydssp.observe.progress import Progress
    from hydssp.observe.tensorboard import Board
    from hydssp.transport.messages import Grant, Pushed
    from hydssp.update.updater import Effect

EVENTS_MODES = ("full", "sample", "off")
DISPOSITIONS = ("gradient", "empty", "rejected", "skipped", "discarded", "ignored")
RUNNING = "running"

_MAX_WORKERS_LISTED = 64
_MAX_WORKERS_NAMED = 8
"""In one line of the log."""
_FLUSH_PERIOD_S = 1.0
_SPIKE_FACTOR = 10.0
_SPIKE_AFTER_PUSHES = 50
_SPIKE_GAP_S = 10.0

_log = logging.getLogger(__name__)
_decisions = logging.getLogger("hydssp.coordination")


class Recorder:
    """What happened so far. The server calls it after each thing it did; only these calls change it."""

    def __init__(
        self,
        folder: RunFolder | None,
        *,
        paradigm: str,
        seed: int | None = None,
        data_size: int | None = None,
        events: str = "full",
        sample_every: int = 10,
        targets: Sequence[float] = (),
        progress_s: float = 5.0,
        summary_s: float = 30.0,
        progress: Progress | None = None,
        controller: Callable[[], Mapping[str, Any]] | None = None,
        board: Board | None = None,
        pull_bytes: int = 0,
        push_bytes: int = 0,
    ) -> None:
        """Open the files.

        Args:
            folder: Where the files go; None keeps everything in memory only.
            paradigm: Label of the paradigm.
            seed: The run's seed.
            data_size: Samples in one epoch; None where there are no epochs.
            events: ``full``, ``sample`` or ``off``.
            sample_every: With ``sample``, every how many pushes of a worker one is kept.
            targets: Test accuracies, 0 .. 1, whose time is wanted.
            progress_s: Seconds between two progress records.
            summary_s: Seconds between two summaries of a run that goes on.
            progress: The console; None for none.
            controller: Gives the controller's figures (``calls``, ``extension_histogram``) whenever a summary
                is made.
            board: TensorBoard's writer; None for none.
            pull_bytes: Of one version of the weights as it travels.
            push_bytes: Of one gradient with its buffers as it travels.

        Raises:
            UserError: When ``events`` is none of the three.
        """
        if events not in EVENTS_MODES:
            raise UserError(f"events: {events!r} is not known; choose one of {', '.join(EVENTS_MODES)}.")
        self.folder = folder
        self._process = psutil.Process()
        self._paradigm = paradigm
        self._seed = seed
        self._data_size = data_size
        self._targets: dict[float, float | None] = dict.fromkeys(targets)
        self._progress_s = progress_s
        self._summary_s = summary_s
        self._progress = progress
        self._controller = controller
        self._board = board
        self._pull_bytes, self._push_bytes = pull_bytes, push_bytes
        self._bytes = {"pushed": 0, "pulled": 0}
        self._spike_logged_at = -math.inf

        has_events = folder is not None and events != "off"
        self._events = JsonLinesWriter(folder.events) if folder is not None and has_events else None
        self._metrics = JsonLinesWriter(folder.metrics) if folder is not None else None
        self._sample_every = sample_every if events == "sample" else 1
        self._is_sampled: list[bool] = []
        """By worker: whether what follows its latest push is kept."""
        self._last_hold_cause: list[str | None] = []

        self._run: dict[str, Any] = {}
        self._workers: list[WorkerStatistics] = []
        self._num_active = 0
        self._totals = Totals()
        self._dispositions = dict.fromkeys(DISPOSITIONS, 0)
        self._rejected_samples = 0
        self._skipped_samples = 0
        self._staleness = IntHistogram()
        self._initial_loss = WindowMean(loss_window(0))
        self._recent_loss = WindowMean(loss_window(0))
        self._gap, self._penalty = LogHistogram(), LogHistogram()
        self._penalty_max: float | None = None
        self._approximated_gaps = 0
        self._window_gap, self._window_penalty = LogHistogram(), LogHistogram()
        self._window_staleness = IntHistogram()
        self._lead_max = 0
        self._run_ahead_max = 0
        self._apply_s = 0.0
        self._busy_s = 0.0
        self._lr: float | None = None
        self._failures: list[dict[str, Any]] = []
        self._evaluations = 0
        self._final: dict[str, Any] = {"version": -1, "accuracy": None, "loss": None}
        self._best_accuracy: float | None = None

        self._started_at = 0.0
        self._ended_at: float | None = None
        self._has_end = False
        self._window_lead_max = 0
        self._metrics_window = (0.0, Totals())
        self._console_window = (0.0, Totals())
        self._next_metrics = math.inf
        self._next_summary = math.inf
        self._next_flush = math.inf
        self._next_tick = math.inf
        self._summary_failed = False

        self._logged_cause: dict[int, str] = {}
        self._logged_at: dict[int, float] = {}
        self._num_not_logged = 0
        self._log_gap_s = 1.0

    # ---- what happened ----

    def started(self, now: float, num_workers: int, **info: Any) -> None:
        """The run begins.

        Args:
            now: Seconds; durations and rates count from here.
            num_workers: P.
            **info: JSON values for the ``start`` event and the summary's ``run``. For a replay from the event
                log alone, give the paradigm's parameters.
        """
        self._run = info
        self._workers = [WorkerStatistics() for _ in range(num_workers)]
        self._num_active = num_workers
        self._is_sampled = [True] * num_workers
        self._last_hold_cause = [None] * num_workers
        self._initial_loss = WindowMean(loss_window(num_workers))
        self._recent_loss = WindowMean(loss_window(num_workers))
        self._log_gap_s = max(1.0, 0.1 * num_workers)
        self._started_at = now
        self._metrics_window = self._console_window = (now, Totals())
        self._next_metrics = now + self._progress_s
        self._next_summary = now + min(self._progress_s, self._summary_s)  # what dies early has numbers, too
        self._next_flush = now + _FLUSH_PERIOD_S
        self._next_tick = now
        if self._events is not None:
            start = {"e": "start", "t": now, "format": 1, "paradigm": self._paradigm, "seed": self._seed}
            self._events.write({**start, "workers": num_workers, **info}, now)

    def push(
        self,
        group: int,
        pushed: Pushed,
        now: float,
        lead: int,
        run_ahead: int,
        disposition: str,
        *,
        is_last: bool = False,
        has_gradient: bool = True,
    ) -> None:
        """A clock message was handled.

        Args:
            group: Number of the coordinator call that got it; pushes handled together share it.
            pushed: The message.
            now: The time that the coordinator was given.
            lead: Of this worker right after the push.
            run_ahead: Of this worker right after the push, over the worker it is farthest ahead of.
            disposition: What became of the gradient: ``gradient`` (accepted), ``empty`` (none came),
                ``rejected`` (not finite), ``skipped`` (overflowed under the worker's loss scale), ``discarded``
                (not wanted any more), ``ignored`` (the worker was not active any more; the push does not count).
            is_last: As the coordinator was told.
            has_gradient: As the coordinator was told.
        """
        w = pushed.worker
        clock = pushed.clock
        worker = self._workers[w]
        self._dispositions[disposition] += 1
        if disposition != "ignored":
            worker.end_wait(pushed.granted_at)
            worker.waits_since = pushed.pushed_at
            worker.clock += 1
            worker.data_s += clock.data_s
            worker.pull_s += clock.pull_s
            worker.compute_s += clock.compute_s
            worker.push_s += clock.push_s
            worker.pull_retries += clock.pull_retries
            worker.cpu_s = clock.cpu_s
            worker.memory_bytes = clock.memory_bytes
            worker.device_bytes = clock.device_bytes
            if clock.samples:
                self._bytes["pulled"] += self._pull_bytes * (1 + clock.pull_retries)
                if disposition != "skipped":
                    self._bytes["pushed"] += self._push_bytes
            totals = self._totals
            if disposition != "discarded":
                worker.pushes += 1
                totals.pushes += 1
            if disposition == "gradient":
                samples = clock.samples
                worker.samples += samples
                totals.samples += samples
                if math.isfinite(clock.loss):
                    self._note_spike(w, clock.loss, now)
                    totals.loss_sum += clock.loss * samples
                    totals.loss_samples += samples
                    self._recent_loss.add(clock.loss, samples)
                    if clock.version == 0:
                        self._initial_loss.add(clock.loss, samples)
                if clock.correct >= 0:
                    totals.correct += clock.correct
                    totals.correct_samples += samples
            elif disposition == "rejected":
                self._rejected_samples += clock.samples
            elif disposition == "skipped":
                self._skipped_samples += clock.samples
            if lead > self._lead_max:
                self._lead_max = lead
            if lead > self._window_lead_max:
                self._window_lead_max = lead
            if run_ahead > self._run_ahead_max:
                self._run_ahead_max = run_ahead
            if self._sample_every > 1:
                self._is_sampled[w] = worker.clock % self._sample_every == 0
        if self._events is not None and self._is_sampled[w]:
            self._events.write(
                {
                    "e": "push",
                    "t": now,
                    "g": group,
                    "w": w,
                    "at": pushed.pushed_at,
                    "granted": pushed.granted_at,
                    "it": clock.iteration,
                    "v": clock.version,
                    "n": clock.samples,
                    "last": is_last,
                    "grad": has_gradient,
                    "lead": lead,
                    "ahead": run_ahead,
                    "d": disposition,
                    "loss": clock.loss if math.isfinite(clock.loss) else None,
                    "data": round(clock.data_s, 6),
                    "pull": round(clock.pull_s, 6),
                    "compute": round(clock.compute_s, 6),
                    "push": round(clock.push_s, 6),
                },
                now,
            )

    def _note_spike(self, w: int, loss: float, now: float) -> None:
        usual = self._recent_loss.mean
        if (
            usual is not None
            and loss > _SPIKE_FACTOR * usual
            and self._totals.pushes > _SPIKE_AFTER_PUSHES
            and now - self._spike_logged_at > _SPIKE_GAP_S
        ):
            self._spike_logged_at = now
            _log.warning("loss spike: %.4g from worker %d, against %.4g in the latest pushes", loss, w, usual)

    def update(
        self,
        now: float,
        version: int,
        applied: Sequence[tuple[int, int, int]],
        lr: float,
        apply_s: float,
        effects: Sequence[Effect] = (),
    ) -> None:
        """The optimizer made a step.

        Args:
            now: Seconds.
            version: Number of the version made.
            applied: (worker, staleness, samples) of each gradient in it.
            lr: Learning rate used.
            apply_s: Seconds the step took.
            effects: What the mitigation found out about each gradient, in the order of ``applied``; empty for
                nothing.
        """
        self._totals.updates += 1
        self._apply_s += apply_s
        self._lr = lr
        for w, staleness, samples in applied:
            worker = self._workers[w]
            worker.updates += 1
            worker.samples_applied += samples
            worker.staleness_sum += staleness
            self._totals.staleness_sum += staleness
            self._totals.staleness_count += 1
            self._window_staleness.add(staleness)
        for effect in effects:
            if effect.gap is not None:
                self._window_gap.add(effect.gap)
                self._approximated_gaps += not effect.is_exact
            if effect.penalty_mean is not None and effect.penalty_max is not None:
                self._window_penalty.add(effect.penalty_mean)
                self._penalty_max = max(effect.penalty_max, self._penalty_max or 0.0)
        if self._events is not None and (
            self._sample_every == 1 or any(self._is_sampled[w] for w, _, _ in applied)
        ):
            self._events.write(
                {
                    "e": "update",
                    "t": now,
                    "v": version,
                    "w": [w for w, _, _ in applied],
                    "stale": [staleness for _, staleness, _ in applied],
                    "n": [samples for _, _, samples in applied],
                    "lr": lr,
                    "apply_s": round(apply_s, 6),
                    "gap": _figures(effect.gap for effect in effects),
                    "penalty": _figures(effect.penalty_mean for effect in effects),
                    "penalty_max": _figures(effect.penalty_max for effect in effects),
                },
                now,
            )

    def release(self, decision: Decision, grant: Grant, now: float) -> None:
        """A worker was sent its grant."""
        w = decision.worker
        worker = self._workers[w]
        worker.grant_sent_at = now
        waited = decision.at - decision.held_since
        if worker.hold_cause is not None:
            cause = worker.hold_cause
            worker.held_s[cause] = worker.held_s.get(cause, 0.0) + max(0.0, waited)
            worker.hold_cause = None
        if self._events is not None and self._is_sampled[w]:
            record = {
                "e": "release",
                "t": now,
                "w": w,
                "cause": decision.cause.value,
                "at": decision.at,
                "clock": decision.clock,
                "lead": decision.lead,
                "ahead": decision.run_ahead,
                "held_since": decision.held_since,
                "ext": decision.extension,
                "it": grant.iteration,
                "v": grant.version,
                "epoch": grant.epoch,
                "start": grant.start,
                "n": grant.count,
                "stop": grant.stop,
            }
            if waited > 0:
                record["reason"] = decision.reason
            self._events.write(record, now)

    def hold(self, decision: Decision, now: float) -> None:
        """A worker pushed and has to wait."""
        w = decision.worker
        cause = decision.cause.value
        worker = self._workers[w]
        worker.holds += 1
        worker.hold_cause = cause
        if self._logged_cause.get(w) != cause:
            self._log_hold(decision, now)
        if self._events is not None and (self._sample_every == 1 or self._last_hold_cause[w] != cause):
            self._is_sampled[w] = True
            self._events.write(
                {
                    "e": "hold",
                    "t": now,
                    "w": w,
                    "cause": cause,
                    "at": decision.at,
                    "clock": decision.clock,
                    "lead": decision.lead,
                    "ahead": decision.run_ahead,
                    "held_since": decision.held_since,
                    "ext": decision.extension,
                    "reason": decision.reason,
                },
                now,
            )
        self._last_hold_cause[w] = cause

    def _log_hold(self, decision: Decision, now: float) -> None:
        # One line when a worker is held for another cause than it was last logged for, and not more often
        # than the gap: a worker that changes between rule and cap at every push would fill the log.
        w = decision.worker
        if now - self._logged_at.get(w, -math.inf) < self._log_gap_s:
            self._num_not_logged += 1
            return
        self._logged_cause[w] = decision.cause.value
        self._logged_at[w] = now
        more = f" ({self._num_not_logged} changes before it not logged)" if self._num_not_logged else ""
        self._num_not_logged = 0
        _decisions.info("%.3f s: %s%s", now - self._started_at, decision.reason, more)

    def finish(self, workers: Sequence[int], now: float, why: str) -> None:
        """Workers left the run in the regular way and were told to stop."""
        if not workers:
            return
        self._leave(workers, now)
        if self._events is not None:
            self._events.write({"e": "finish", "t": now, "w": list(workers), "why": why}, now)
        names = ", ".join(str(w) for w in workers[:_MAX_WORKERS_NAMED])
        if len(workers) > _MAX_WORKERS_NAMED:
            names += f" and {len(workers) - _MAX_WORKERS_NAMED} more"
        _decisions.info("%.3f s: finished: worker %s (%s)", now - self._started_at, names, why)

    def failure(self, worker: int, now: float, why: str) -> None:
        """A worker is taken out because it failed or was evicted."""
        self._leave((worker,), now)
        self._failures.append({"worker": worker, "t": now, "why": why})
        if self._events is not None:
            self._events.write({"e": "failure", "t": now, "w": worker, "why": why}, now)
        _decisions.warning("%.3f s: worker %d failed: %s", now - self._started_at, worker, why)

    def _leave(self, workers: Sequence[int], now: float) -> None:
        for w in workers:
            if self._workers[w].is_active:
                self._workers[w].leave(now)
                self._num_active -= 1
        if self._num_active == 0 and self._ended_at is None:
            self._ended_at = now

    def evaluation(
        self,
        now: float,
        version: int,
        samples: int,
        accuracy: float | None,
        loss: float | None,
        pinned_at: float,
    ) -> None:
        """An evaluation on test data came in.

        Args:
            now: Seconds, when its result arrived.
            version: The version evaluated.
            samples: Training samples that the version had seen.
            accuracy: 0 .. 1; None where that has no meaning.
            loss: Mean test loss.
            pinned_at: Seconds, when the evaluated weights were the newest: the time that counts for a target.
        """
        self._evaluations += 1
        if version >= self._final["version"]:
            self._final = {"version": version, "accuracy": accuracy, "loss": loss}
        if accuracy is not None and math.isfinite(accuracy):
            if self._best_accuracy is None or accuracy > self._best_accuracy:
                self._best_accuracy = accuracy
            for target, reached in self._targets.items():
                at = pinned_at - self._started_at
                if accuracy >= target and (reached is None or at < reached):
                    self._targets[target] = at
        record = {
            "t": now,
            "pinned_at": pinned_at,
            "version": version,
            "samples": samples,
            "epoch": self._epochs(samples),
            "accuracy": accuracy,
            "loss": loss,
        }
        if self._metrics is not None:
            self._metrics.write({"kind": "evaluation", **record}, now)
        if self._board is not None:
            self._board.scalars("evaluation", record)

    def busy(self, seconds: float) -> None:
        """The server spent ``seconds`` on handling something, not on waiting for messages."""
        self._busy_s += seconds

    # ---- from time to time ----

    def tick(self, now: float) -> None:
        """Write the progress record, console line and summary that are due; for each turn of the loop."""
        if now < self._next_tick:
            return
        if now >= self._next_metrics and self._ended_at is None:
            self._progress_record(now)
            self._next_metrics = now + self._progress_s
        if now >= self._next_summary:
            self._next_summary = now + self._summary_s
            self._periodic_summary(now)
        if now >= self._next_flush:
            self._next_flush = now + _FLUSH_PERIOD_S
            for writer in (self._events, self._metrics):
                if writer is not None:
                    writer.flush_if_old(now)
        self._next_tick = min(self._next_metrics, self._next_summary, self._next_flush)
        if self._progress is not None:
            if self._progress.is_due(now):
                status = self._status(now, self._console_window)
                self._progress.show({**status, "test_accuracy": self._final["accuracy"]}, now)
                self._console_window = (now, copy.copy(self._totals))
            self._next_tick = min(self._next_tick, self._progress.next_due)

    def _progress_record(self, now: float) -> None:
        if self._metrics is not None:
            status = {**self._status(now, self._metrics_window), "lead_max": self._window_lead_max}
            self._metrics.write({"kind": "progress", **status, **self._usage()}, now)
            if self._board is not None:
                self._board.scalars("progress", status)
                self._show_histograms(self._board)
        self._close_window()
        self._metrics_window = (now, copy.copy(self._totals))
        self._window_lead_max = 0

    def _show_histograms(self, board: Board) -> None:
        """Those of the time since the latest progress record."""
        samples, stale = self._totals.samples, self._window_staleness
        if stale.total:
            bins = [(s - 0.5, s + 0.5, stale.counts[s]) for s in sorted(stale.counts)]
            squares = sum(s * s * count for s, count in stale.counts.items())
            board.histogram("update/staleness", bins, sums=(stale.sum, squares), samples=samples)
        for name, histogram in (("gap", self._window_gap), ("penalty", self._window_penalty)):
            if histogram.total:
                sums = (histogram.sum, histogram.square_sum)
                board.histogram(f"update/{name}", histogram.bins(), sums=sums, samples=samples)

    def _histograms(self) -> tuple[IntHistogram, LogHistogram, LogHistogram]:
        """Of staleness, gap and penalty, since the start."""
        return (
            self._staleness + self._window_staleness,
            self._gap + self._window_gap,
            self._penalty + self._window_penalty,
        )

    def _close_window(self) -> None:
        """Pushes are counted in the window alone, and added up when it ends."""
        self._staleness, self._gap, self._penalty = self._histograms()
        self._window_staleness = IntHistogram()
        self._window_gap, self._window_penalty = LogHistogram(), LogHistogram()

    def _status(self, now: float, window: tuple[float, Totals]) -> dict[str, Any]:
        since, before = window
        totals = self._totals
        seconds = now - since

        def ratio(above: float, below: float) -> float | None:
            return above / below if below > 0 else None

        active_clocks = [worker.clock for worker in self._workers if worker.is_active]
        held = [w for w, worker in enumerate(self._workers) if worker.hold_cause is not None]
        return {
            "t": now,
            "epoch": self._epochs(totals.samples),
            "samples": totals.samples,
            "updates": totals.updates,
            "pushes": totals.pushes,
            "samples_per_s": ratio(totals.samples - before.samples, seconds),
            "pushes_per_s": ratio(totals.pushes - before.pushes, seconds),
            "train_loss": ratio(totals.loss_sum - before.loss_sum, totals.loss_samples - before.loss_samples),
            "train_accuracy": ratio(
                totals.correct - before.correct, totals.correct_samples - before.correct_samples
            ),
            "lr": self._lr,
            "lead_max": max(active_clocks) - min(active_clocks) if active_clocks else 0,
            "run_ahead_max": self._run_ahead_max,
            "staleness_mean": ratio(
                totals.staleness_sum - before.staleness_sum, totals.staleness_count - before.staleness_count
            ),
            "active": self._num_active,
            "num_held": len(held),
            "held": held[:_MAX_WORKERS_LISTED],
            "clocks": [worker.clock for worker in self._workers[:_MAX_WORKERS_LISTED]],
        }

    def _usage(self) -> dict[str, Any]:
        """Memory in bytes and processor seconds so far: of the server, and of the first workers as they last said."""
        listed = self._workers[:_MAX_WORKERS_LISTED]
        return {
            "server_memory_bytes": self._process.memory_info().rss,
            "server_cpu_s": time.process_time(),
            "memory_bytes": [worker.memory_bytes for worker in listed],
            "device_bytes": [worker.device_bytes for worker in listed],
            "cpu_s": [worker.cpu_s for worker in listed],
        }

    def _epochs(self, samples: int) -> float | None:
        return samples / self._data_size if self._data_size else None

    def _periodic_summary(self, now: float) -> None:
        try:
            self.write_summary(now, RUNNING, "the run has not ended", is_durable=False)
        except OSError as error:
            if not self._summary_failed:
                _log.warning("the summary cannot be written (%s); the run goes on", error)
            self._summary_failed = True

    # ---- the end ----

    def summary(self, now: float, status: str, reason: str) -> dict[str, Any]:
        """What came out of the run so far.

        Args:
            now: Seconds.
            status: One word: how it stands or ended.
            reason: Why, in words.

        Returns:
            Strict JSON values (no nan). ``wall_s`` runs from ``started`` until the last worker left, and all
            rates refer to it. ``pushes``, also by worker, are those that came while the run went on: one
            under way when it ended trained nothing, and counts in ``discarded_pushes`` alone, although it
            moves the worker's clock. ``samples`` are those of accepted gradients; ``rejected_samples`` were
            dealt, too, but their gradients were refused, and those of ``skipped_samples`` overflowed in float16 and
            were not pushed, so that ``epochs`` stays below what was reached.
            ``final_accuracy`` and ``final_loss`` belong to the newest version evaluated on test data;
            ``first_train_loss`` is the mean over the pushes computed from the initial weights (about one
            per worker), ``final_train_loss`` the mean over the latest pushes (100, or 4 per worker).
            ``time_to_accuracy`` has a key per target, seconds from the start to the moment when the weights
            that reached it were the newest. ``gap`` and ``penalty`` tell what the mitigation measured per
            gradient (null where it measures nothing): root mean square of weights now less weights used, and
            what the gradient was divided by; ``penalty.mean`` and the histogram are of the mean over the
            elements, ``penalty.max`` is the largest element's. ``gap.approximated`` counts gradients for which
            a version near their own had to do. ``lead_max`` and ``run_ahead_max`` are taken right after pushes.
            ``bytes`` are those of weights, gradients and buffers that travelled, repeated pulls included; the small
            messages and the evaluation are not in it. In ``time_s_by_worker``, ``wait`` runs from a push until the
            worker saw its next grant; ``held_s`` in ``by_worker`` is the part of it spent held. ``server.apply_s`` is
            the sum over all updates.
        """
        wall_s = max(0.0, (now if self._ended_at is None else self._ended_at) - self._started_at)
        totals = self._totals
        staleness, gap, penalty = self._histograms()

        def per_second(count: int) -> float | None:
            return count / wall_s if wall_s > 0 else None

        controller = {"calls": 0, "extension_histogram": {}}
        if self._controller is not None:
            controller.update(self._controller())
        summary: dict[str, Any] = {
            "status": status,
            "reason": reason,
            "paradigm": self._paradigm,
            "seed": self._seed,
            "num_workers": len(self._workers),
            "updates": totals.updates,
            "pushes": totals.pushes,
            "samples": totals.samples,
            "epochs": self._epochs(totals.samples),
            "wall_s": wall_s,
            "updates_per_s": per_second(totals.updates),
            "pushes_per_s": per_second(totals.pushes),
            "samples_per_s": per_second(totals.samples),
            "final_accuracy": self._final["accuracy"],
            "final_loss": self._final["loss"],
            "best_accuracy": self._best_accuracy,
            "first_train_loss": self._initial_loss.mean,
            "final_train_loss": self._recent_loss.mean,
            "evaluations": self._evaluations,
            "final_accuracy_at_update": self._final["version"] if self._evaluations else None,
            "time_to_accuracy": {f"{target:g}": at for target, at in self._targets.items()},
            "lead_max": self._lead_max,
            "run_ahead_max": self._run_ahead_max,
            "staleness": staleness.to_dict(),
            "gap": {**gap.to_dict(), "approximated": self._approximated_gaps},
            "penalty": {**penalty.to_dict(), "max": self._penalty_max},
            "time_s_by_worker": [worker.times() for worker in self._workers],
            "by_worker": [{"worker": w, **worker.counts()} for w, worker in enumerate(self._workers)],
            "controller": controller,
            "server": {
                "busy_s": self._busy_s,
                "busy_fraction": min(1.0, self._busy_s / wall_s) if wall_s > 0 else None,
                "apply_s": self._apply_s,
            },
            "rejected_gradients": self._dispositions["rejected"],
            "rejected_samples": self._rejected_samples,
            "skipped_pushes": self._dispositions["skipped"],
            "skipped_samples": self._skipped_samples,
            "discarded_pushes": self._dispositions["discarded"],
            "empty_pushes": self._dispositions["empty"],
            "ignored_pushes": self._dispositions["ignored"],
            "bytes": dict(self._bytes),
            "pull_retries": sum(worker.pull_retries for worker in self._workers),
            "failures": list(self._failures),
            "run": self._run,
        }
        strict: dict[str, Any] = to_strict(summary)
        return strict

    def write_summary(
        self, now: float, status: str, reason: str, *, is_durable: bool = True
    ) -> dict[str, Any]:
        """Write ``summary.json`` whole and return what is in it.

        Any status but ``running`` says that the run has ended: the ``end`` event and a last progress record
        are written, once.

        Raises:
            OSError: When the file cannot be written.
        """
        if status != RUNNING and not self._has_end:
            self._has_end = True
            # Training is what its rates are of, not the evaluation of the final weights.
            self._progress_record(now if self._ended_at is None else self._ended_at)
            if self._events is not None:
                self._events.write({"e": "end", "t": now, "status": status, "reason": reason}, now)
            for writer in (self._events, self._metrics):
                if writer is not None:
                    writer.flush(now)
        summary = self.summary(now, status, reason)
        if self.folder is not None:
            # Indenting takes several times as long, so that the server loop's own summaries do without.
            text = json.dumps(summary, indent=1 if is_durable else None, allow_nan=False) + "\n"
            write_atomically(self.folder.summary, text, is_durable=is_durable)
        return summary

    def close(self) -> None:
        """Write what is buffered, close the files and the console line; idempotent."""
        for writer in (self._events, self._metrics):
            if writer is not None:
                writer.close()
        if self._board is not None:
            self._board.close()
        if self._progress is not None:
            self._progress.close()


def _figures(values: Iterable[float | None]) -> list[float] | None:
    """Six significant digits of each for the event log; None when there are none."""
    known = [float(f"{value:.6g}") for value in values if value is not None]
    return known or None
