"""The console of rank 0: how the run goes, and a table at its end.

Shows what it is given. On a terminal a live status at the bottom (rich, refreshed only by ``show``); anywhere
else plain lines, never an escape code. Reads no clock: the caller says what time it is.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

from hydssp.observe.statistics import loss_window, share_of_time

_LIVE_PERIOD_S = 0.5
_MAX_WORKER_ROWS = 24
_LEAST_FALL = 0.05
"""A training loss that fell by a smaller part of what it was with the initial weights counts as not fallen."""
_CAUSES = {
    "held_by_rule": "held by the rule that bounds its lead",
    "held_by_cap": "held by the cap on its run-ahead",
}


def is_terminal(stream: TextIO) -> bool:
    """Whether what is written to ``stream`` ends on a terminal that understands escape codes.

    ``isatty`` alone is not enough: Open MPI gives its processes a pseudo-terminal for stdout even when the
    launcher's own output goes to a file. Such a one has no window size; then the launcher's stdout decides.
    """
    try:
        if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
            return False
        if os.get_terminal_size(stream.fileno()).columns > 0:
            return True
    except (OSError, ValueError, AttributeError):
        return False
    return _is_launcher_on_terminal()


def _is_launcher_on_terminal() -> bool:
    try:
        own = os.readlink("/proc/self/fd/1")
        for parent in psutil.Process().parents():
            place = os.readlink(f"/proc/{parent.pid}/fd/1")
            if place != own:  # a wrapper script between launcher and rank shares our stdout
                return place.startswith(("/dev/pts/", "/dev/tty"))
    except (OSError, psutil.Error):
        pass
    return False


def status_line(status: Mapping[str, Any]) -> str:
    """One line of plain text from a progress record and ``test_accuracy``, without what is None."""
    parts = [f"{status['t']:7.1f} s"]
    for key, form in (
        ("epoch", "epoch {:.2f}"),
        ("samples_per_s", "{:.0f} samples/s"),
        ("pushes_per_s", "{:.1f} pushes/s"),
        ("train_loss", "loss {:.4f}"),
        ("test_accuracy", "test acc {:.4f}"),
        ("lead_max", "lead {}"),
        ("staleness_mean", "staleness {:.2f}"),
    ):
        if status.get(key) is not None:
            parts.append(form.format(status[key]))
    held = list(status.get("held") or ())
    if held:
        more = status.get("num_held", len(held)) - min(len(held), 8)
        names = ",".join(str(worker) for worker in held[:8]) + (f" and {more} more" if more > 0 else "")
        parts.append(f"held {names}")
    return "  ".join(parts)


class Progress:
    """Where ``Recorder.tick`` shows how the run goes."""

    def __init__(
        self, *, stream: TextIO | None = None, progress_s: float = 5.0, is_live: bool | None = None
    ) -> None:
        """Show nothing yet.

        Args:
            stream: Where to; None for stdout.
            progress_s: Seconds between two plain lines; a live line is refreshed every 0.5 s.
            is_live: True or False overrules ``is_terminal``.
        """
        self._stream = sys.stdout if stream is None else stream
        self._is_live = is_terminal(self._stream) if is_live is None else is_live
        self._period_s = _LIVE_PERIOD_S if self._is_live else progress_s
        self._live: Any = None
        self._is_started = False
        if self._is_live:
            # Here and not in ``show``: importing rich takes too long for the server's loop.
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, force_terminal=True, highlight=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
        self.next_due = -math.inf
        """Time in seconds from which on something may be shown."""

    def is_due(self, now: float) -> bool:
        """Whether something may be shown again."""
        if self.next_due == -math.inf:
            self.next_due = now + self._period_s  # nothing to tell at the very start
        return now >= self.next_due

    def show(self, status: Mapping[str, Any], now: float) -> None:
        """Show one progress record; the caller has asked ``is_due``."""
        self.next_due = now + self._period_s
        line = status_line(status)
        if self._live is None:
            _print(self._stream, line)
            return
        with contextlib.suppress(OSError):  # as in _print
            if not self._is_started:
                self._is_started = True
                self._live.start()
                self._live.console.show_cursor(True)  # a killed run could not show it again
            self._live.update(line, refresh=True)

    def close(self) -> None:
        """Take the live line away; idempotent."""
        if self._is_started:
            self._is_started = False
            with contextlib.suppress(OSError):
                self._live.stop()


def _print(stream: TextIO, text: str) -> None:
    # A reader that went away ("| head") must not end the run.
    with contextlib.suppress(OSError, ValueError):
        stream.write(text + "\n")
        stream.flush()  # whole lines at once, also through a launcher's pipe


# ---- the end ----


def print_summary(
    summary: Mapping[str, Any],
    folder: str | os.PathLike[str] | None = None,
    *,
    stream: TextIO | None = None,
    is_live: bool | None = None,
) -> None:
    """Print what ``Recorder.summary`` returned: a table, a line per worker, a sentence of what it means.

    Args:
        summary: As in ``summary.json``.
        folder: The run folder, to be named.
        stream: Where to; None for stdout.
        is_live: True or False overrules ``is_terminal``.
    """
    stream = sys.stdout if stream is None else stream
    facts = _facts(summary)
    head, rows, num_left_out = _worker_rows(summary)
    notes = [*_meaning(summary)]
    if num_left_out:
        notes.insert(
            0, f"{num_left_out} more workers are in summary.json; shown are those that waited longest."
        )
    if folder is not None:
        notes.append(f"Run folder: {Path(folder)}")
    if is_terminal(stream) if is_live is None else is_live:
        _print_rich(stream, facts, head, rows, notes)
    else:
        width = max(len(name) for name, _ in facts)
        lines = [f"{name:<{width}}  {value}" for name, value in facts]
        if rows:
            lines += ["", *_aligned([head, *rows])]
        _print(stream, "\n".join([*lines, "", *notes]))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, stream: TextIO | None = None) -> None:
    """Print columns, the last one as text to the left, all others to the right."""
    lines = _aligned([[*row[:-1]] for row in (head, *rows)])
    last = [row[-1] for row in (head, *rows)]
    _print(
        sys.stdout if stream is None else stream,
        "\n".join(f"{a}  {b}" for a, b in zip(lines, last, strict=True)),
    )


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    def figure(key: str, form: str) -> str:
        return number(summary[key], form)

    staleness = summary["staleness"]
    delays = [
        number(staleness[key], form) for key, form in (("mean", "{:.2f}"), ("p99", "{}"), ("max", "{}"))
    ]
    server = summary["server"]
    counts = f"{summary['updates']} updates, {summary['pushes']} pushes"
    speed = f"{figure('samples_per_s', '{:.0f}')} samples/s, {figure('pushes_per_s', '{:.1f}')} pushes/s"
    test = f"accuracy {figure('final_accuracy', '{:.4f}')}, loss {figure('final_loss', '{:.4f}')}"
    facts = [
        ("status", f"{summary['status']}: {summary['reason']}"),
        ("paradigm", f"{summary['paradigm']}, {summary['num_workers']} workers, seed {summary['seed']}"),
        ("time", figure("wall_s", "{:.1f} s")),
        ("work", f"{figure('epochs', '{:.2f}')} epochs, {counts}"),
        ("speed", speed),
        ("test", test),
        ("train loss", figure("final_train_loss", "{:.4f}")),
        *(
            (f"time to {target}", "not reached" if at is None else f"{at:.1f} s")
            for target, at in summary["time_to_accuracy"].items()
        ),
        ("staleness", "mean {}, p99 {}, max {}".format(*delays)),
        *_gap_facts(summary),
        ("lead", f"max {summary['lead_max']}, run-ahead max {summary['run_ahead_max']}"),
        ("server", f"busy {number(server['busy_fraction'], '{:.0%}')}, updates {server['apply_s']:.2f} s"),
    ]
    lost = [
        f"{summary[key]} {word}"
        for key, word in (
            ("rejected_gradients", "rejected (not finite)"),
            ("skipped_pushes", "skipped (loss scale)"),
            ("discarded_pushes", "discarded"),
            ("empty_pushes", "empty"),
            ("ignored_pushes", "ignored"),
        )
        if summary.get(key)
    ]
    return facts + ([("pushes without effect", ", ".join(lost))] if lost else [])


def _gap_facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the mitigation measured; nothing where it measures nothing."""
    gap, penalty = summary.get("gap", {}), summary.get("penalty", {})
    facts = []
    if gap.get("mean") is not None:
        facts.append(("gap", f"mean {gap['mean']:.3g}, max {gap['max']:.3g}"))
    if penalty.get("mean") is not None:
        facts.append(("penalty", f"mean {penalty['mean']:.3g}, max {penalty['max']:.3g}"))
    return facts


def _worker_rows(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]], int]:
    times = summary["time_s_by_worker"]
    phases = ("compute", "wait", "pull", "push", "data")
    shown = list(range(len(times)))
    if len(shown) > _MAX_WORKER_ROWS:
        shown = sorted(sorted(shown, key=lambda w: -times[w]["wait"])[:_MAX_WORKER_ROWS])
    rows = []
    for w in shown:
        counts = summary["by_worker"][w]
        staleness = counts["staleness_mean"]
        shares = share_of_time(times[w])
        rows.append(
            [str(w), str(counts["pushes"]), str(counts["samples"])]
            + [f"{shares[phase]:.0%}" for phase in phases]
            + [str(counts["holds"]), "-" if staleness is None else f"{staleness:.2f}"]
        )
    return ["worker", "pushes", "samples", *phases, "holds", "staleness"], rows, len(times) - len(shown)


def _meaning(summary: Mapping[str, Any]) -> list[str]:
    """Plain sentences: which worker waited most and why, and what else a reader should not miss."""
    notes = []
    times = summary["time_s_by_worker"]
    shares = [share_of_time(worker)["wait"] for worker in times]
    if shares and summary["pushes"]:
        most = max(range(len(shares)), key=lambda w: shares[w])
        if shares[most] < 0.05:
            notes.append(f"No worker waited for more than {shares[most]:.0%} of its time.")
        else:
            notes.append(_who_waited(summary, most, shares[most]))
    for failure in summary["failures"]:
        notes.append(f"Worker {failure['worker']} failed at {failure['t']:.1f} s: {failure['why']}")
    if summary["rejected_gradients"]:
        notes.append(
            f"{summary['rejected_gradients']} gradients contained inf or nan and were not applied, so that "
            f"{summary['rejected_samples']} samples of these epochs were not trained on; a lower learning rate or "
            "gradient clipping may help."
        )
    if why := _why_not_learned(summary):
        also = " async_weight=per_worker and a paradigm with less staleness (ssp, bsp) may help, too."
        notes.append(
            f"The run did not learn: {why}. Try a lower optimizer.lr first."
            + (also if summary["staleness"]["max"] else "")
        )
    return notes


def _why_not_learned(summary: Mapping[str, Any]) -> str:
    """What shows that training came to nothing; empty: nothing does, or the run was too short to tell."""
    first, last = summary["first_train_loss"], summary["final_train_loss"]
    if summary["evaluations"] and summary["final_loss"] is None:
        return "the loss of the final weights is not finite"
    if last is None and summary["rejected_gradients"]:
        return "not one gradient was finite"
    # The mean over the latest pushes must not reach back to the beginning.
    if summary["pushes"] < 2 * loss_window(summary["num_workers"]) or first is None or last is None:
        return ""
    if last <= first - _LEAST_FALL * abs(first):
        return ""
    return f"the training loss was {first:.4g} with the initial weights, and {last:.4g} in the latest pushes"


def _who_waited(summary: Mapping[str, Any], most: int, share: float) -> str:
    wait_s = summary["time_s_by_worker"][most]["wait"]
    held_s = summary["by_worker"][most]["held_s"]
    said = f"Worker {most} waited most, {share:.0%} of its time ({wait_s:.1f} s)"
    if sum(held_s.values()) < 0.5 * wait_s:
        busy = summary["server"]["busy_fraction"]
        server = "" if busy is None else f"; the server was busy {busy:.0%} of the time"
        return f"{said}, mostly for the server's answer and not because it was held{server}."
    cause = max(held_s, key=lambda name: held_s[name])
    why = f"{said}, mostly {_CAUSES.get(cause, cause)}"
    slowest = _slowest(summary)
    if slowest is None or slowest == most:
        return f"{why}."
    return f"{why}, while worker {slowest}, the slowest, caught up."


def _slowest(summary: Mapping[str, Any]) -> int | None:
    """The worker that needs the longest for an iteration, waits left out."""
    cost = {
        w: (sum(times.values()) - times["wait"]) / counts["pushes"]
        for w, (times, counts) in enumerate(
            zip(summary["time_s_by_worker"], summary["by_worker"], strict=True)
        )
        if counts["pushes"]
    }
    return max(cost, key=lambda w: cost[w]) if cost else None


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _print_rich(
    stream: TextIO,
    facts: Sequence[tuple[str, str]],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, force_terminal=True, highlight=False)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts:
        table.add_row(name, Text(value))
    console.print(table)
    if rows:
        # No box and narrow gaps: a launcher's pseudo-terminal has no size and counts as 80 columns.
        workers = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in head:
            workers.add_column(name, justify="right")
        for row in rows:
            workers.add_row(*row)
        console.print(workers)
        console.print()
    for note in notes:
        console.print(Text(note), soft_wrap=True)
