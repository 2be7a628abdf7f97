"""A recorded run, read back from its folder: what the coordinator was told, what it answered, how long things took.

One job: read ``config.yaml`` and ``events.jsonl`` (``observe.recorder`` says what is in them). Decides nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hydssp.coordination.events import Push
from hydssp.errors import UserError
from hydssp.observe.jsonl import read_records
from hydssp.observe.run_folder import RunFolder


@dataclass
class Call:
    """One call of the coordinator, and the releases and holds that were recorded after it.

    Attributes:
        kind: ``start``, ``pushes``, ``finish`` or ``failure``.
        now: The time that the coordinator was given, seconds.
        pushes: For ``pushes``.
        workers: For ``finish`` and ``failure``.
        releases: Records of those that were granted.
        holds: Records of those that had to wait.
    """

    kind: str
    now: float
    pushes: list[Push] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    releases: list[dict[str, Any]] = field(default_factory=list)
    holds: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Recording:
    """One run.

    Attributes:
        path: Its folder.
        config: As it was composed.
        num_workers: P.
        calls: Of the coordinator, in order.
        pushes: All push records, in order.
        apply_s: Seconds of each update.
        is_complete: Whether the log goes to the run's end.
    """

    path: Path
    config: dict[str, Any]
    num_workers: int
    calls: list[Call]
    pushes: list[dict[str, Any]]
    apply_s: list[float]
    is_complete: bool

    @property
    def duration_s(self) -> float:
        """Seconds from the first grant to the last push."""
        return float(self.pushes[-1]["t"] - self.calls[0].now) if self.pushes else 0.0


def read_recording(key: str, path: str) -> Recording:
    """Read the run in folder ``path``, which the configuration calls ``key``.

    Raises:
        UserError: When there is no run with a complete event log.
    """
    folder = RunFolder(Path(path))
    try:
        config = yaml.safe_load(folder.config.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(
            f"{key}={path}: not a run folder ({error}); give one that holds config.yaml"
        ) from error
    if config["events"] != "full":
        raise UserError(
            f"{key}={path}: the run was recorded with events={config['events']}; allowed is a run with events=full"
        )
    try:
        return _read(folder, config)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"{key}={path}: events.jsonl cannot be read ({type(error).__name__}: {error}); give the folder of a run as "
            "hydssp wrote it"
        ) from error


def _read(folder: RunFolder, config: dict[str, Any]) -> Recording:
    records = read_records(folder.events)
    start = next(records, None)
    if start is None:
        raise ValueError("it is empty")
    calls: list[Call] = []
    pushes: list[dict[str, Any]] = []
    apply_s: list[float] = []
    active = set(range(start["workers"]))
    group, is_complete = -1, False
    for record in records:
        kind = record["e"]
        if kind == "push":
            if record["g"] != group:
                group = record["g"]
                calls.append(Call("pushes", record["t"]))
            calls[-1].pushes.append(Push(record["w"], record["at"], record["last"], record["grad"]))
            pushes.append(record)
            if record["last"]:
                active.discard(record["w"])
        elif kind == "release":
            if not calls:
                calls.append(Call("start", record["at"]))
            calls[-1].releases.append(record)
        elif kind == "hold":
            calls[-1].holds.append(record)
        elif kind == "update":
            apply_s.append(record["apply_s"])
        elif kind == "finish":
            # Workers whose last push said so have left with it; the others were told to go.
            if leaving := active.intersection(record["w"]):
                calls.append(Call("finish", record["t"], workers=sorted(leaving)))
                active -= leaving
        elif kind == "failure":
            if not (calls[-1].kind == "failure" and calls[-1].now == record["t"] and not calls[-1].releases):
                calls.append(Call("failure", record["t"]))
            calls[-1].workers.append(record["w"])
            active.discard(record["w"])
        elif kind == "end":
            is_complete = True
    return Recording(folder.path, config, start["workers"], calls, pushes, apply_s, is_complete)


def read_summary(recording: Recording) -> dict[str, Any]:
    """The run's ``summary.json``.

    Raises:
        UserError: When it is not there.
    """
    path = RunFolder(recording.path).summary
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); choose a run that has a summary") from error
    return summary


def full_pushes(recording: Recording) -> list[dict[str, Any]]:
    """The push records with a batch behind them, each with ``grant`` added: seconds until its worker saw the grant."""
    sent_at = {(r["w"], r["it"]): r["t"] for call in recording.calls for r in call.releases}
    return [
        {**push, "grant": max(0.0, push["granted"] - sent_at[push["w"], push["it"]])}
        for push in recording.pushes
        if push["n"] and (push["w"], push["it"]) in sent_at
    ]


def answers_s(recording: Recording) -> list[float]:
    """Seconds from each decision on one push alone until the grant that answered it was sent: the server's work."""
    return [
        call.releases[-1]["t"] - call.now
        for call in recording.calls
        if call.kind == "pushes" and len(call.pushes) == len(call.releases) == 1
    ]
