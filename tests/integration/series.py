"""The program of ``launching.train_series``: many runs on the ranks of one launch, one after the other.

Most of a short run is its start, and of that the import of torch on every rank. Here it is paid once: rank 0 composes
each configuration and has all ranks run it, as ``--multirun`` does, but for unrelated configurations.

    mpirun -np 4 python tests/integration/series.py RUNS.json RESULTS.json
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

from hydssp.abort import guard
from hydssp.errors import UserError
from hydssp.launcher import Launch
from hydssp.train import USAGE, follow


def one(overrides, session):
    """What ``python -m hydssp.train`` does on rank 0 with these overrides; returns the exit code."""
    from hydra import compose, initialize_config_module

    from hydssp import config, job

    config.register()
    try:
        with initialize_config_module("hydssp.conf", version_base="1.3"):
            plain = config.to_plain(compose("train", overrides=overrides))
        config.check(plain)
    except UserError as error:
        print(f"hydssp: {error}", file=sys.stderr)
        return USAGE
    session.broadcast(plain)
    return job.run(plain, session)


def main():
    # The rank first: what MPI is told by the launcher must be known before torch is loaded, as in hydssp.train.
    launch = Launch.from_environment(os.environ)
    from hydssp.session import Session

    session = Session()
    if launch.rank != 0:
        return follow(session)
    runs, results = (Path(argument) for argument in sys.argv[1:])
    done = {}
    for name, overrides in json.loads(runs.read_text()).items():
        begun, out, err = time.monotonic(), io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = one(overrides, session)
        done[name] = [code, out.getvalue(), err.getvalue(), time.monotonic() - begun]
        results.write_text(json.dumps(done))
    session.broadcast(0)
    return 0


if __name__ == "__main__":
    guard(main)
