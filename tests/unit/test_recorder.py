"""The recorder's files and figures, from calls as the server makes them."""

from __future__ import annotations

import enum
import json
import logging
import math
from dataclasses import dataclass, replace

import pytest

from hydssp.errors import UserError
from hydssp.observe.jsonl import read_records
from hydssp.observe.recorder import Recorder
from hydssp.observe.run_folder import RunFolder
from hydssp.transport.messages import Clock, Grant, Pushed
from hydssp.update.updater import Effect


class Cause(enum.Enum):
    LEAD = "lead"
    AWAITED_PUSH = "awaited_push"
    RULE = "held_by_rule"
    CAP = "held_by_cap"


@dataclass
class Decision:
    worker: int
    cause: Cause
    at: float
    held_since: float
    clock: int = 1
    lead: int = 0
    run_ahead: int = 0
    extension: int = 0
    times_asked: int = 0

    @property
    def reason(self):
        self.times_asked += 1
        return f"worker {self.worker}: {self.cause.value}"


def hold(worker, at, cause=Cause.RULE):
    return Decision(worker, cause, at, held_since=at)


def release(worker, at, held_since=None, cause=Cause.LEAD):
    return Decision(worker, cause, at, held_since=at if held_since is None else held_since)


def message(worker, granted_at, pushed_at, *, iteration=0, samples=10, loss=1.0, correct=5, **clock):
    return Pushed(
        worker,
        Clock(iteration=iteration, version=0, samples=samples, loss=loss, correct=correct, **clock),
        granted_at=granted_at,
        pushed_at=pushed_at,
        received_at=pushed_at,
    )


class FakeBoard:
    def __init__(self):
        self.histograms = []

    def scalars(self, prefix, record):
        pass

    def histogram(self, name, bins, *, sums, samples):
        self.histograms.append((name, bins))

    def close(self):
        pass


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def events_of(recorder):
    recorder.close()
    return list(read_records(recorder.folder.events))


def test_events_of_a_short_run_hold_what_a_replay_needs(folder):
    recorder = Recorder(folder, paradigm="ssp", seed=7)
    recorder.started(0.5, 2, s=3)
    for w in range(2):
        recorder.release(release(w, 0.5), Grant(iteration=0, version=0, count=10), 0.5)
    pushed = message(1, 0.6, 1.0000000001, data_s=0.1234567, compute_s=0.25)
    recorder.push(1, pushed, 1.1, 1, 2, "gradient", is_last=False, has_gradient=True)
    recorder.update(1.2, 1, [(1, 0, 10)], lr=0.02, apply_s=0.001)
    held = hold(1, 1.1)
    recorder.hold(held, 1.2)
    recorder.push(2, message(0, 0.6, 1.9, samples=0, loss=math.nan), 2.0, 0, 0, "empty", has_gradient=False)
    recorder.release(release(1, 2.0, 1.1, Cause.AWAITED_PUSH), Grant(1, 1, 0, 20, 10), 2.0)
    recorder.finish([0], 2.0, "max_updates")
    recorder.failure(1, 3.0, "no sign for 60 s")
    recorder.write_summary(3.0, "done", "max_updates=1 reached")

    start, first, _, push, update, hold_, empty, waited, finish, failure, end = events_of(recorder)
    assert start == {
        "e": "start",
        "t": 0.5,
        "format": 1,
        "paradigm": "ssp",
        "seed": 7,
        "workers": 2,
        "s": 3,
    }
    assert "reason" not in first
    assert push == {
        "e": "push",
        "t": 1.1,
        "g": 1,
        "w": 1,
        "at": 1.0000000001,
        "granted": 0.6,
        "it": 0,
        "v": 0,
        "n": 10,
        "last": False,
        "grad": True,
        "lead": 1,
        "ahead": 2,
        "d": "gradient",
        "loss": 1.0,
        "data": 0.123457,
        "pull": 0.0,
        "compute": 0.25,
        "push": 0.0,
    }
    assert update == {
        "e": "update",
        "t": 1.2,
        "v": 1,
        "w": [1],
        "stale": [0],
        "n": [10],
        "lr": 0.02,
        "apply_s": 0.001,
        "gap": None,
        "penalty": None,
        "penalty_max": None,
    }
    assert (hold_["e"], hold_["cause"], hold_["reason"]) == (
        "hold",
        "held_by_rule",
        "worker 1: held_by_rule",
    )
    assert (empty["grad"], empty["loss"], empty["d"], empty["g"]) == (False, None, "empty", 2)
    assert waited["reason"] == "worker 1: awaited_push"
    assert (waited["held_since"], waited["at"], waited["start"], waited["n"]) == (1.1, 2.0, 20, 10)
    assert finish == {"e": "finish", "t": 2.0, "w": [0], "why": "max_updates"}
    assert failure == {"e": "failure", "t": 3.0, "w": 1, "why": "no sign for 60 s"}
    assert end == {"e": "end", "t": 3.0, "status": "done", "reason": "max_updates=1 reached"}


def test_time_of_a_worker_adds_up_from_its_first_grant_to_its_stop():
    recorder = Recorder(None, paradigm="ssp")
    recorder.started(0.0, 1)
    phases = {"data_s": 0.1, "pull_s": 0.2, "compute_s": 0.5, "push_s": 0.2}
    recorder.push(1, message(0, 1.0, 2.0, **phases), 2.1, 1, 0, "gradient")
    recorder.release(release(0, 2.3, 2.1), Grant(1, 1), 2.3)
    recorder.push(2, message(0, 2.5, 3.5, **phases), 3.6, 1, 0, "gradient", is_last=True)
    recorder.finish([0], 3.75, "epochs")
    (times,) = recorder.summary(9.0, "done", "epochs")["time_s_by_worker"]
    assert times == pytest.approx({"data": 0.2, "pull": 0.4, "compute": 1.0, "push": 0.4, "wait": 0.75})
    assert sum(times.values()) == pytest.approx(3.75 - 1.0)


def test_worker_that_fails_while_computing_did_not_wait_until_then():
    recorder = Recorder(None, paradigm="ssp")
    recorder.started(0.0, 1)
    recorder.push(1, message(0, 1.0, 2.0), 2.0, 1, 0, "gradient")
    recorder.release(release(0, 2.5, 2.0), Grant(1, 1), 2.5)
    recorder.failure(0, 60.0, "gone")
    assert recorder.summary(60.0, "failed", "x")["time_s_by_worker"][0]["wait"] == 0.5


def test_summary_has_every_key_and_counts_right(folder):
    recorder = Recorder(
        folder,
        paradigm="dssp(3,15)",
        seed=3,
        data_size=100,
        controller=lambda: {"calls": 4, "extension_histogram": {0: 1, 2: 3}},
        pull_bytes=100,
        push_bytes=12,
    )
    recorder.started(10.0, 2, model="mlp")
    recorder.push(1, message(0, 10.1, 11.0, loss=2.0, pull_retries=2), 11.0, 1, 1, "gradient")
    recorder.update(11.0, 1, [(0, 0, 10)], 0.1, 0.01)
    recorder.push(2, message(0, 11.1, 12.0, loss=math.nan), 12.0, 2, 2, "rejected")
    recorder.push(3, message(1, 10.1, 12.5, samples=30, loss=1.0), 12.5, 0, 0, "gradient")
    recorder.push(3, message(0, 12.1, 12.5, samples=0), 12.5, 2, 1, "empty")
    recorder.update(12.6, 2, [(1, 1, 30)], 0.1, 0.02)
    recorder.push(4, message(1, 12.7, 13.0), 13.0, 0, 0, "discarded")
    recorder.busy(1.0)
    recorder.finish([0, 1], 14.0, "epochs")
    recorder.push(5, message(1, 13.0, 14.5), 14.5, 9, 9, "ignored")
    summary = recorder.write_summary(99.0, "done", "epochs=1 reached")

    recorder.close()

    assert json.loads(folder.summary.read_text()) == summary
    expected = {
        "status": "done",
        "reason": "epochs=1 reached",
        "paradigm": "dssp(3,15)",
        "seed": 3,
        "num_workers": 2,
        "updates": 2,
        "pushes": 4,  # not the one that was discarded
        "samples": 40,
        "epochs": 0.4,
        "wall_s": 4.0,  # until the last worker left, not until the summary was made
        "updates_per_s": 0.5,
        "pushes_per_s": 1.0,
        "samples_per_s": 10.0,
        "final_accuracy": None,
        "final_loss": None,
        "final_train_loss": 1.25,
        "time_to_accuracy": {},
        "lead_max": 2,
        "run_ahead_max": 2,
        "staleness": {"mean": 0.5, "p50": 0, "p99": 1, "max": 1, "histogram": {"0": 1, "1": 1}},
        "controller": {"calls": 4, "extension_histogram": {"0": 1, "2": 3}},
        "server": {"busy_s": 1.0, "busy_fraction": 0.25, "apply_s": pytest.approx(0.03)},
        "rejected_gradients": 1,
        "rejected_samples": 10,
        "discarded_pushes": 1,
        "empty_pushes": 1,
        "ignored_pushes": 1,
        "bytes": {
            "pushed": 4 * 12,
            "pulled": (4 + 2) * 100,
        },  # not the empty, the skipped, the one that was ignored
        "skipped_pushes": 0,
        "pull_retries": 2,
        "failures": [],
        "run": {"model": "mlp"},
    }
    assert {key: summary[key] for key in expected} == expected
    first, second = summary["by_worker"]
    assert (first["worker"], first["pushes"], first["samples"], first["samples_applied"]) == (0, 3, 10, 10)
    assert (second["pushes"], second["updates"], second["staleness_mean"]) == (1, 1, 1.0)
    (progress,) = read_records(folder.metrics)
    assert (progress["pushes"], progress["clocks"]) == (4, [3, 2])  # the coordinator counts it


def test_the_first_loss_is_that_of_the_initial_weights():
    recorder = Recorder(None, paradigm="asp")
    recorder.started(0.0, 2)
    recorder.push(1, message(0, 0.1, 1.0, loss=2.0), 1.0, 1, 1, "gradient")
    recorder.push(2, message(1, 0.1, 1.5, samples=30, loss=4.0), 1.5, 1, 1, "gradient")
    assert recorder.summary(2.0, "running", "")["first_train_loss"] == 3.5
    later = message(0, 1.1, 2.0, loss=90.0)
    later = replace(later, clock=replace(later.clock, version=1))
    recorder.push(3, later, 2.0, 1, 1, "gradient")
    assert recorder.summary(2.0, "running", "")["first_train_loss"] == 3.5


def test_what_a_mitigation_measured_is_in_events_and_summary(folder):
    board = FakeBoard()
    recorder = Recorder(folder, paradigm="asp", progress_s=5.0, board=board)
    recorder.started(0.0, 2)
    recorder.update(
        1.0, 1, [(0, 3, 10), (1, 0, 10)], 0.1, 0.0, [Effect(0.02, 4.0, 9.0, False), Effect(0.0, 1.0, 1.0)]
    )
    recorder.update(2.0, 2, [(0, 1, 10)], 0.1, 0.0, [Effect(0.04, 1.0, 2.0)])
    recorder.tick(6.0)
    recorder.update(7.0, 3, [(1, 1, 10)], 0.1, 0.0, [Effect(None, 2.0, 2.0)])
    summary = recorder.summary(8.0, "done", "")
    assert summary["gap"] == {
        "mean": pytest.approx(0.02),
        "max": 0.04,
        "histogram": {"0": 1, "0.0178": 1, "0.0316": 1},
        "approximated": 1,
    }
    assert summary["penalty"] == {"mean": 2.0, "max": 9.0, "histogram": {"1": 2, "1.78": 1, "3.16": 1}}
    assert summary["staleness"]["histogram"] == {"0": 1, "1": 2, "3": 1}
    first, _, last = [e for e in events_of(recorder) if e["e"] == "update"]
    assert (first["gap"], first["penalty"], first["penalty_max"]) == ([0.02, 0.0], [4.0, 1.0], [9.0, 1.0])
    assert (last["gap"], last["penalty"]) == (None, [2.0])
    shown = {name: sum(count for *_, count in bins) for name, bins in board.histograms}
    assert shown == {
        "update/staleness": 3,
        "update/gap": 3,
        "update/penalty": 3,
    }  # of the window that has ended


def test_without_a_mitigation_gap_and_penalty_are_null(folder):
    recorder = Recorder(folder, paradigm="asp")
    recorder.started(0.0, 1)
    recorder.update(1.0, 1, [(0, 0, 10)], 0.1, 0.0)
    summary = recorder.summary(2.0, "done", "")
    assert summary["gap"] == {"mean": None, "max": None, "histogram": {}, "approximated": 0}
    assert summary["penalty"] == {"mean": None, "max": None, "histogram": {}}
    (update,) = [e for e in events_of(recorder) if e["e"] == "update"]
    assert (update["gap"], update["penalty"], update["penalty_max"]) == (None, None, None)


def test_target_time_is_when_the_weights_were_the_newest(folder):
    recorder = Recorder(folder, paradigm="bsp", data_size=50, targets=(0.8, 0.9, 0.99))
    recorder.started(5.0, 1)
    recorder.evaluation(9.0, 10, 100, 0.85, 0.5, pinned_at=8.0)
    recorder.evaluation(12.0, 20, 200, 0.93, 0.3, pinned_at=11.0)
    recorder.evaluation(14.0, 30, 300, 0.88, math.nan, pinned_at=13.5)
    recorder.evaluation(14.5, 15, 150, 0.91, 0.4, pinned_at=10.0)  # came late, from an older version
    summary = recorder.summary(15.0, "done", "x")
    assert summary["time_to_accuracy"] == {"0.8": 3.0, "0.9": 5.0, "0.99": None}
    assert (summary["final_accuracy"], summary["final_loss"]) == (0.88, None)
    assert summary["best_accuracy"] == 0.93
    recorder.close()
    first, _, last, _ = read_records(folder.metrics)
    assert first == {
        "kind": "evaluation",
        "t": 9.0,
        "pinned_at": 8.0,
        "version": 10,
        "samples": 100,
        "epoch": 2.0,
        "accuracy": 0.85,
        "loss": 0.5,
    }
    assert last["loss"] is None


PER_WORKER_USAGE = ("memory_bytes", "device_bytes", "cpu_s")


def test_a_loss_spike_is_logged_and_names_the_worker(caplog):
    recorder = Recorder(None, paradigm="asp")
    recorder.started(0.0, 2)
    for step in range(60):
        recorder.push(step, message(0, step, step + 0.5, loss=1.0), step + 0.5, 0, 0, "gradient")
    recorder.push(60, message(1, 60.0, 61.0, loss=9.0), 61.0, 0, 0, "gradient")
    assert "spike" not in caplog.text
    recorder.push(61, message(1, 61.0, 62.0, loss=30.0), 62.0, 0, 0, "gradient")
    recorder.push(62, message(1, 62.0, 63.0, loss=30.0), 63.0, 0, 0, "gradient")
    assert caplog.text.count("loss spike: 30 from worker 1") == 1


def test_progress_records_cover_the_time_since_the_one_before(folder):
    recorder = Recorder(folder, paradigm="ssp", data_size=100, progress_s=5.0)
    recorder.started(0.0, 3)
    recorder.tick(0.0)
    recorder.push(1, message(0, 0.1, 1.0, loss=4.0), 1.0, 5, 4, "gradient")
    recorder.update(1.0, 1, [(0, 3, 10)], 0.1, 0.0)
    recorder.tick(4.9)
    recorder.tick(5.0)
    use = {"memory_bytes": 1000, "cpu_s": 0.5}
    recorder.push(2, message(0, 1.1, 6.0, loss=2.0, correct=10, **use), 6.0, 2, 1, "gradient")
    recorder.push(2, message(1, 0.1, 6.0, samples=30, loss=1.0, correct=0), 6.0, 1, 1, "gradient")
    recorder.update(6.0, 2, [(0, 1, 10), (1, 2, 30)], 0.05, 0.0)
    recorder.hold(hold(0, 6.0), 6.0)
    recorder.tick(10.0)
    recorder.close()
    first, second = read_records(folder.metrics)
    assert (first["kind"], first["t"], first["pushes_per_s"], first["train_loss"]) == (
        "progress",
        5.0,
        0.2,
        4.0,
    )
    assert (first["lead_max"], first["staleness_mean"]) == (5, 3.0)
    usage = {key: second.pop(key) for key in ("server_memory_bytes", "server_cpu_s", *PER_WORKER_USAGE)}
    assert usage["server_memory_bytes"] > 1e6
    assert [usage[key][0] for key in PER_WORKER_USAGE] == [1000, 0, 0.5]  # as the worker last said
    assert second == {
        "kind": "progress",
        "t": 10.0,
        "epoch": 0.5,
        "samples": 50,
        "updates": 2,
        "pushes": 3,
        "samples_per_s": 8.0,
        "pushes_per_s": 0.4,
        "train_loss": 1.25,
        "train_accuracy": 0.25,
        "lr": 0.05,
        "lead_max": 2,
        "run_ahead_max": 4,
        "staleness_mean": 1.5,
        "active": 3,
        "num_held": 1,
        "held": [0],
        "clocks": [2, 1, 0],
    }


def test_the_last_progress_record_ends_with_training_and_not_with_the_evaluation(folder):
    recorder = Recorder(folder, paradigm="ssp", progress_s=5.0)
    recorder.started(0.0, 1)
    recorder.tick(5.0)
    recorder.push(1, message(0, 0.1, 6.0), 6.0, 1, 1, "gradient", is_last=True)
    recorder.finish([0], 7.0, "epochs")
    recorder.tick(11.0)
    recorder.evaluation(60.0, 1, 10, 0.5, 1.0, 6.0)
    recorder.write_summary(60.0, "done", "epochs")
    recorder.close()
    _, last = (record for record in read_records(folder.metrics) if record["kind"] == "progress")
    assert (last["t"], last["pushes"], last["pushes_per_s"]) == (7.0, 1, 0.5)


def test_records_of_large_runs_list_at_most_64_workers(folder):
    recorder = Recorder(folder, paradigm="bsp", progress_s=1.0)
    recorder.started(0.0, 200)
    for w in range(200):
        recorder.hold(hold(w, 0.5), 0.5)
    recorder.tick(1.0)
    recorder.close()
    (record,) = read_records(folder.metrics)
    assert (len(record["held"]), record["num_held"], len(record["clocks"])) == (64, 200, 64)


def drive(recorder, num_pushes, *, cause=lambda i: Cause.RULE):
    """Two workers in turn: push, update, hold of worker 0, release."""
    recorder.started(0.0, 2)
    for i in range(num_pushes):
        for w in range(2):
            now = i + w / 2
            recorder.push(i, message(w, now, now, iteration=i), now, 0, 0, "gradient")
            recorder.update(now, 2 * i + w, [(w, 0, 10)], 0.1, 0.0)
            if w == 0:
                recorder.hold(hold(w, now, cause(i)), now)
            recorder.release(release(w, now + 0.25, now if w == 0 else None), Grant(i + 1, 0), now + 0.25)


def test_sampled_events_keep_every_kth_push_and_changes_of_cause(folder):
    recorder = Recorder(folder, paradigm="ssp", events="sample", sample_every=5)
    drive(recorder, 10, cause=lambda i: Cause.CAP if i == 7 else Cause.RULE)
    events = events_of(recorder)
    kinds = {
        kind: [(r["it"], r["w"]) for r in events if r["e"] == kind and "it" in r]
        for kind in ("push", "release")
    }
    assert kinds["push"] == [(4, 0), (4, 1), (9, 0), (9, 1)]
    # each kept push with its release, and the releases of the three holds that were kept
    assert kinds["release"] == [(1, 0), (5, 0), (5, 1), (8, 0), (9, 0), (10, 0), (10, 1)]
    assert [r["v"] for r in events if r["e"] == "update"] == [8, 9, 18, 19]
    assert [r["t"] for r in events if r["e"] == "hold"] == [0.0, 7.0, 8.0]
    assert recorder.summary(10.0, "done", "x")["pushes"] == 20


def test_events_off_writes_none_and_changes_no_figure(tmp_path):
    summaries = {}
    for mode in ("full", "sample", "off"):
        (tmp_path / mode).mkdir()
        recorder = Recorder(RunFolder(tmp_path / mode), paradigm="ssp", events=mode)
        drive(recorder, 20)
        summaries[mode] = recorder.summary(20.0, "done", "x")
        recorder.close()
    assert not (tmp_path / "off" / "events.jsonl").exists()
    assert summaries["full"] == summaries["sample"] == summaries["off"]
    assert summaries["full"]["by_worker"][0]["held_s"] == {"held_by_rule": 5.0}
    assert summaries["full"]["by_worker"][0]["holds"] == 20


def test_reasons_are_only_made_for_waits(folder):
    recorder = Recorder(folder, paradigm="ssp")
    recorder.started(0.0, 1)
    at_once, later = release(0, 1.0), release(0, 2.0, 1.0)
    recorder.release(at_once, Grant(0, 0), 1.0)
    recorder.release(later, Grant(1, 0), 2.0)
    assert (at_once.times_asked, later.times_asked) == (0, 1)
    recorder.close()


def test_unknown_events_mode_names_the_choices():
    with pytest.raises(UserError, match=r"events.*'some'.*full, sample, off"):
        Recorder(None, paradigm="ssp", events="some")


def test_unknown_disposition_is_refused():
    recorder = Recorder(None, paradigm="ssp")
    recorder.started(0.0, 1)
    with pytest.raises(KeyError):
        recorder.push(1, message(0, 0.1, 1.0), 1.0, 0, 0, "lost")


def test_holds_are_logged_when_the_cause_changes_and_not_too_often(caplog):
    recorder = Recorder(None, paradigm="dssp")
    recorder.started(0.0, 2)
    with caplog.at_level(logging.INFO, logger="hydssp.coordination"):
        for now, worker, cause in [
            (1.0, 0, Cause.RULE),
            (1.1, 1, Cause.RULE),
            (1.2, 0, Cause.CAP),  # too soon after worker 0's line
            (1.3, 0, Cause.RULE),
            (3.0, 0, Cause.RULE),  # the same as last logged
            (4.0, 0, Cause.CAP),
        ]:
            recorder.hold(hold(worker, now, cause), now)
    assert [record.getMessage() for record in caplog.records] == [
        "1.000 s: worker 0: held_by_rule",
        "1.100 s: worker 1: held_by_rule",
        "4.000 s: worker 0: held_by_cap (1 changes before it not logged)",
    ]


def test_a_line_of_the_log_names_at_most_eight_workers(caplog):
    recorder = Recorder(None, paradigm="asp")
    recorder.started(0.0, 500)
    with caplog.at_level(logging.INFO, logger="hydssp.coordination"):
        recorder.finish(range(8), 1.0, "epochs")
        recorder.finish(range(8, 500), 2.0, "epochs")
    assert [record.getMessage() for record in caplog.records] == [
        "1.000 s: finished: worker 0, 1, 2, 3, 4, 5, 6, 7 (epochs)",
        "2.000 s: finished: worker 8, 9, 10, 11, 12, 13, 14, 15 and 484 more (epochs)",
    ]


def test_failure_is_a_warning_and_part_of_the_summary(caplog):
    recorder = Recorder(None, paradigm="ssp")
    recorder.started(0.0, 2)
    recorder.failure(1, 4.0, "no sign for 60 s")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    summary = recorder.summary(5.0, "done", "x")
    assert summary["failures"] == [{"worker": 1, "t": 4.0, "why": "no sign for 60 s"}]
    assert summary["wall_s"] == 5.0  # worker 0 still runs


def test_summary_is_rewritten_while_the_run_goes_on(folder):
    recorder = Recorder(folder, paradigm="ssp")
    recorder.started(0.0, 1)
    recorder.tick(4.0)
    assert not folder.summary.exists()
    recorder.push(1, message(0, 0.1, 1.0), 1.0, 1, 0, "gradient")
    recorder.tick(5.0)  # early, since what is killed then has no numbers otherwise
    killed = json.loads(folder.summary.read_text())
    assert (killed["status"], killed["pushes"], killed["wall_s"]) == ("running", 1, 5.0)
    for now, written_at in ((34.9, 5.0), (35.0, 35.0)):
        recorder.tick(now)
        assert json.loads(folder.summary.read_text())["wall_s"] == written_at
    recorder.write_summary(36.0, "done", "epochs")
    assert json.loads(folder.summary.read_text())["status"] == "done"
    recorder.close()


def test_periodic_summary_that_cannot_be_written_warns_once(folder, caplog):
    recorder = Recorder(folder, paradigm="ssp")
    recorder.started(0.0, 1)
    folder.summary.mkdir()  # in the way
    for now in (30.0, 60.0, 90.0):
        recorder.tick(now)
    assert len(caplog.records) == 1
    with pytest.raises(OSError):
        recorder.write_summary(91.0, "done", "x")
    recorder.close()


def test_events_reach_the_file_while_the_server_is_idle(folder):
    recorder = Recorder(folder, paradigm="ssp")
    recorder.started(0.0, 1)
    recorder.push(1, message(0, 0.0, 0.5), 0.5, 1, 0, "gradient")
    assert [record["e"] for record in read_records(folder.events)] == ["start"]
    recorder.tick(1.5)
    assert [record["e"] for record in read_records(folder.events)] == ["start", "push"]
    recorder.close()


def test_end_is_written_once(folder):
    recorder = Recorder(folder, paradigm="ssp")
    recorder.started(0.0, 1)
    recorder.write_summary(1.0, "interrupted", "SIGINT")
    recorder.write_summary(2.0, "interrupted", "SIGINT, weights saved")
    recorder.close()
    recorder.close()
    assert [record["e"] for record in events_of(recorder)] == ["start", "end"]
    assert len(list(read_records(folder.metrics))) == 1
    assert json.loads(folder.summary.read_text())["reason"] == "SIGINT, weights saved"


class Console:
    """A console that is due every second and keeps what it is shown."""

    def __init__(self):
        self.next_due = 1.0
        self.shown = []
        self.is_closed = False

    def is_due(self, now):
        return now >= self.next_due

    def show(self, status, now):
        self.shown.append(status)
        self.next_due = now + 1.0

    def close(self):
        self.is_closed = True


def test_console_has_its_own_window_and_the_test_accuracy():
    console = Console()
    recorder = Recorder(None, paradigm="ssp", progress_s=5.0, progress=console)
    recorder.started(0.0, 1)
    for now in range(1, 5):
        recorder.push(now, message(0, now - 1.0, now), now, 0, 0, "gradient")
        recorder.evaluation(now, now, 10, now / 10, 1.0, now)
        recorder.tick(float(now))
        recorder.tick(now + 0.5)
    assert [status["pushes_per_s"] for status in console.shown] == [1.0] * 4
    assert [status["test_accuracy"] for status in console.shown] == [0.1, 0.2, 0.3, 0.4]
    recorder.close()
    assert console.is_closed
