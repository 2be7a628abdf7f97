from __future__ import annotations

import os
import signal

import pytest

from hydssp.signals import StopRequest


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)]
)
def test_the_first_signal_is_remembered_and_the_handlers_restored(number, code):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.code == 0
        os.kill(os.getpid(), number)
        assert stop.code == code
    assert signal.getsignal(number) == before


def test_a_repeated_termination_changes_nothing():
    with StopRequest() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert stop.code == 75


def test_a_second_interrupt_is_taken_for_impatience():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.code == 130
