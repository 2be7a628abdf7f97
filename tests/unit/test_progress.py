"""What the console shows, on a terminal and elsewhere."""

from __future__ import annotations

import io
import os

import pytest

from hydssp.observe import progress
from hydssp.observe.progress import Progress, is_terminal, print_summary, status_line
from hydssp.observe.recorder import Recorder

STATUS = {
    "t": 12.34,
    "epoch": 1.5,
    "samples_per_s": 1234.5,
    "pushes_per_s": 38.58,
    "train_loss": 0.4321,
    "test_accuracy": 0.91234,
    "lead_max": 4,
    "staleness_mean": 1.25,
    "held": [0, 2],
    "num_held": 2,
}


def test_status_line_says_all_of_it():
    assert " ".join(status_line(STATUS).split()) == (
        "12.3 s epoch 1.50 1234 samples/s 38.6 pushes/s loss 0.4321 test acc 0.9123 "
        "lead 4 staleness 1.25 held 0,2"
    )


def test_status_line_leaves_out_what_is_not_known():
    line = status_line({"t": 0.0, "epoch": None, "lead_max": 0, "held": [], "train_loss": None})
    assert line.split() == ["0.0", "s", "lead", "0"]


def test_status_line_of_many_held_workers_stays_short():
    line = status_line({**STATUS, "held": list(range(64)), "num_held": 200})
    assert line.endswith("held 0,1,2,3,4,5,6,7 and 192 more")


def test_plain_lines_come_every_progress_s_without_escape_codes():
    stream = io.StringIO()
    console = Progress(stream=stream, progress_s=5.0)
    shown = []
    for tenth in range(121):
        now = 100.0 + tenth / 10
        if console.is_due(now):
            console.show({**STATUS, "t": now}, now)
            shown.append(now)
    console.close()
    assert shown == [105.0, 110.0]
    assert len(stream.getvalue().splitlines()) == 2
    assert "\x1b" not in stream.getvalue()


def test_live_line_is_refreshed_twice_a_second_and_taken_away(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    console = Progress(stream=stream, progress_s=5.0, is_live=True)
    shown = 0
    for tenth in range(21):
        if console.is_due(tenth / 10):
            console.show(STATUS, tenth / 10)
            shown += 1
    console.close()
    console.close()
    assert shown == 4
    assert "epoch 1.50" in stream.getvalue()
    assert "held 0,2" in stream.getvalue()  # wrapped, not cut off
    assert "\x1b[" in stream.getvalue()


def test_reader_that_went_away_does_not_end_the_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    Progress(stream=Closed()).show(STATUS, 5.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 1


@pytest.mark.parametrize(
    ("columns", "term", "launcher", "expected"),
    [
        (80, "xterm", False, True),
        (80, "dumb", True, False),
        (0, "xterm", True, True),  # Open MPI's pseudo-terminal, mpirun on a terminal
        (0, "xterm", False, False),  # the same with mpirun's output in a file
    ],
)
def test_terminal_is_recognised(monkeypatch, columns, term, launcher, expected):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((columns, 24)))
    monkeypatch.setattr(progress, "_is_launcher_on_terminal", lambda: launcher)
    assert is_terminal(Terminal()) is expected


def test_file_and_closed_stream_are_no_terminal(tmp_path):
    with open(tmp_path / "out", "w") as file:
        assert not is_terminal(file)
    assert not is_terminal(file)
    assert not is_terminal(io.StringIO())


def make_summary(waits, *, held_s=None, busy_s=1.0, cause="held_by_rule", pushes=None, **changes):
    """A summary of workers that compute for 10 s each and wait as given, all of the wait held unless told."""
    recorder = Recorder(None, paradigm="ssp", seed=0, data_size=100, targets=(0.9, 0.95))
    recorder.started(0.0, len(waits))
    for w, wait in enumerate(waits):
        worker = recorder._workers[w]
        worker.pushes = pushes[w] if pushes else 100
        worker.samples = 3200
        worker.compute_s = 10.0
        worker.wait_s = wait
        worker.holds = 7
        worker.held_s = {cause: wait if held_s is None else held_s[w]}
    recorder._totals.pushes = 100 * len(waits)
    recorder.busy(busy_s)
    return {**recorder.summary(20.0, "done", "epochs=2 reached"), **changes}


def printed(summary, **kwargs):
    stream = io.StringIO()
    print_summary(summary, "runs/here", stream=stream, **kwargs)
    return stream.getvalue()


def test_summary_has_a_line_per_worker_and_the_run_folder():
    text = printed(make_summary([10.0, 0.0, 30.0], time_to_accuracy={"0.9": 3.21, "0.95": None}))
    assert "\x1b" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["2", "100", "3200", "25%", "75%", "0%", "0%", "0%", "7", "-"] in lines
    assert sum(line[:3] == [str(w), "100", "3200"] for w in range(3) for line in lines) == 3
    assert "status" in text
    assert "done: epochs=2 reached" in text
    assert ["time", "to", "0.9", "3.2", "s"] in lines
    assert ["time", "to", "0.95", "not", "reached"] in lines
    assert text.rstrip().endswith("Run folder: runs/here")


def test_sentence_names_who_waited_and_for_whom():
    text = printed(make_summary([10.0, 0.5, 0.0], pushes=[100, 90, 20]))
    assert (
        "Worker 0 waited most, 50% of its time (10.0 s), mostly held by the rule that bounds its lead, "
        "while worker 2, the slowest, caught up."
    ) in text
    text = printed(make_summary([10.0, 0.5, 0.0], pushes=[100, 90, 20], cause="held_by_cap"))
    assert "held by the cap on its run-ahead" in text


def test_sentence_tells_a_busy_server_from_a_hold():
    text = printed(make_summary([10.0, 9.0], held_s=[1.0, 1.0], busy_s=18.0))
    assert "mostly for the server's answer and not because it was held; the server was busy 90%" in text


def test_sentence_when_nobody_waits():
    assert "No worker waited for more than 1% of its time." in printed(make_summary([0.1, 0.05]))


def test_failures_and_rejected_gradients_are_pointed_out():
    text = printed(
        make_summary(
            [0.0, 0.0],
            failures=[{"worker": 1, "t": 4.2, "why": "no sign for 60 s"}],
            rejected_gradients=3,
            rejected_samples=96,
        )
    )
    assert "Worker 1 failed at 4.2 s: no sign for 60 s" in text
    assert "3 gradients contained inf or nan and were not applied" in text
    assert "96 samples of these epochs were not trained on" in text
    assert "3 rejected" in text


LEARNED = {
    "pushes": 1000,
    "evaluations": 3,
    "final_loss": 0.3,
    "first_train_loss": 2.3,
    "final_train_loss": 0.2,
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"final_train_loss": 2.29}, "was 2.3 with the initial weights, and 2.29 in the latest pushes"),
        ({"final_train_loss": 1e9}, "and 1e+09 in the latest pushes"),
        ({"final_train_loss": 2.29, "pushes": 199}, None),  # too short to tell
        ({"first_train_loss": None}, None),  # went on from weights of another run
        ({"final_loss": None}, "the loss of the final weights is not finite"),
        ({"final_loss": None, "evaluations": 0}, None),  # not evaluated
        ({"first_train_loss": None, "final_train_loss": None, "rejected_gradients": 9}, "not one gradient"),
        ({"first_train_loss": -1.0, "final_train_loss": -3.0}, None),
        ({"first_train_loss": -1.0, "final_train_loss": -1.01}, "was -1 with the initial weights"),
    ],
)
def test_a_run_that_did_not_learn_is_told_so_and_what_to_try(changes, why):
    text = printed({**make_summary([0.0, 0.0]), **LEARNED, **changes})
    assert ("The run did not learn" in text) == (why is not None)
    if why:
        assert why in text
        assert "Try a lower optimizer.lr first." in text
        assert "async_weight" not in text


def test_staleness_is_named_where_there_was_some():
    stale = {"mean": 1.0, "p50": 1, "p99": 2, "max": 2, "histogram": {}}
    text = printed({**make_summary([0.0]), **LEARNED, "final_loss": None, "staleness": stale})
    assert "async_weight=per_worker and a paradigm with less staleness (ssp, bsp)" in text


def test_many_workers_are_cut_to_those_that_waited_longest():
    text = printed(make_summary([float(w) for w in range(100)]))
    rows = [line.split()[0] for line in text.splitlines() if "100" in line.split()[1:2]]
    assert rows == [str(w) for w in range(76, 100)]
    assert "76 more workers" in text


def test_run_that_never_began_prints_too():
    recorder = Recorder(None, paradigm="bsp")
    assert "interrupted" in printed(recorder.summary(0.0, "interrupted", "before the start"))
    recorder.started(0.0, 2)
    assert "0 pushes" in printed(recorder.summary(0.0, "interrupted", "before the first push"))


def test_rich_table_on_a_terminal_of_80_columns_is_complete(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(make_summary([10.0, 0.0]), is_live=True)
    assert "\x1b[" in text
    assert "…" not in text
    assert "staleness" in text
    assert "Run folder: runs/here" in text
