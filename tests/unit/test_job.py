"""What a run does before it has begun."""

from __future__ import annotations

import os
import signal

import pytest
from test_config import compose_plain

from hydssp import job, task
from hydssp.errors import UserError


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_signal_before_the_run_leaves_nothing(tmp_path, monkeypatch, capsys, number, code, has_failed):
    """As when a kernel is compiled: a signal to the whole process group also ends the compiler."""
    make_optimizer = task.make_optimizer

    def make_slowly(config):
        os.kill(os.getpid(), number)
        if has_failed:
            raise UserError("the compiler was ended")
        return make_optimizer(config)

    monkeypatch.setattr(task, "make_optimizer", make_slowly)
    folder = tmp_path / "run"
    assert job.run(compose_plain("num_workers=2", "transport=local", f"run_dir={folder}"), None) == code
    assert "stopped by a signal before training began" in capsys.readouterr().err
    assert not folder.exists()
