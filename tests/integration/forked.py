"""The program of ``test_bad_input``: the command line many times, each in a fork of a process that has imported it.

For what ends before training: no MPI, no threads. Every fork leaves as the real program does, through ``guard``.

    python tests/integration/forked.py CASES.json RESULTS.json [MODULE...]
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

from hydssp import train
from hydssp.abort import guard

AT_ONCE = 2


def start(arguments, place):
    """Fork a ``python -m hydssp.train`` with ``arguments``; returns its process number."""
    child = os.fork()
    if child == 0:
        run(arguments, place)
    return child


def run(arguments, place):
    """The child's part; does not return."""
    for number, suffix in enumerate((".out", ".err"), start=1):
        os.dup2(os.open(place.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), number)
    sys.argv[:] = [train.__file__, *arguments]
    guard(train.main)


def main():
    cases, results = (Path(argument) for argument in sys.argv[1:3])
    for module in ("hydra", "hydssp.config", "hydssp.command_line", *sys.argv[3:]):
        importlib.import_module(module)
    todo = list(json.loads(cases.read_text()).items())
    places = {name: results.with_name(f"said_{name}") for name, _ in todo}
    running, done = {}, {}
    while todo or running:
        while todo and len(running) < AT_ONCE:
            name, arguments = todo.pop(0)
            running[start(arguments, places[name])] = name, time.monotonic()
        child, status = os.wait()
        name, begun = running.pop(child)
        said = [places[name].with_suffix(suffix).read_text() for suffix in (".out", ".err")]
        done[name] = [os.waitstatus_to_exitcode(status), *said, time.monotonic() - begun]
    results.write_text(json.dumps({name: done[name] for name in places}))


if __name__ == "__main__":
    main()
