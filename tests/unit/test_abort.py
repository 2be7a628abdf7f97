"""The last words of a rank that cannot go on, and its exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import errno, sys
from hydssp.abort import guard
from hydssp.errors import TrainingError, UserError

def users_code():
    raise KeyError("cat.png")

def main():
    if sys.argv[1] == "fault":
        users_code()
    if sys.argv[1] == "mistake":
        raise UserError("data: sample 3 is bad")
    if sys.argv[1] == "disk":
        raise OSError(errno.ENOSPC, "No space left on device", "summary.json")
    try:
        users_code()
    except KeyError as error:
        raise TrainingError("data: reading sample 3 failed") from error.with_traceback(error.__traceback__.tb_next)

guard(main)
"""


@pytest.mark.parametrize(
    ("how", "num_traced", "last_line"),
    [
        ("fault", 3, "KeyError: 'cat.png'"),
        ("training", 1, "data: reading sample 3 failed"),
        ("mistake", 0, "data: sample 3 is bad"),
        (
            "disk",
            0,
            "the disk is full, or the quota used up: [Errno 28] No space left on device: 'summary.json'",
        ),
    ],
)
def test_the_last_line_says_what_it_was_and_our_own_traceback_is_shown_for_faults_only(
    how, num_traced, last_line
):
    result = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    first, *middle, last = result.stderr.splitlines()
    assert first.startswith("hydssp: rank 0 on ")
    assert last == last_line
    assert sum(line.startswith("  File") for line in middle) == num_traced
