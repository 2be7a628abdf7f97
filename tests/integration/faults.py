"""Losses that make one rank fail in the middle of training; named by the tests' overrides as loss._target_."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch

from hydssp.launcher import Launch


class FailingLoss(torch.nn.CrossEntropyLoss):
    """Cross entropy that fails on ``rank`` at the ``at``-th batch that needs a gradient (kill_later: after seconds)."""

    def __init__(self, how: str, rank: int = 1, at: int = 5) -> None:
        super().__init__()
        self.how, self.at = how, at
        self.is_here = Launch.from_environment(os.environ).rank == rank
        self.calls = 0
        if how == "kill_later" and self.is_here:
            threading.Timer(at, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def forward(self, outputs, targets):
        if self.how == "evaluation" and "evaluation" in sys.argv[0]:
            raise ValueError("the evaluation met a bad batch")
        if self.is_here and outputs.requires_grad and self.how not in ("evaluation", "kill_later"):
            self.calls += 1
            if self.calls == self.at:
                self.fail()
        return super().forward(outputs, targets)

    def fail(self):
        if self.how == "raise":
            raise ValueError("the model met a bad batch")
        if self.how == "exit":
            sys.exit(3)
        if self.how == "exit0":
            sys.exit(0)
        if self.how == "os_exit":
            os._exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            time.sleep(1000)
        if self.how == "thread":
            threading.Thread(target=self.raise_in_thread).start()
            time.sleep(60)
        raise AssertionError(self.how)

    def raise_in_thread(self):
        raise ValueError("a thread met a bad batch")


def failing_model(rank: int = 1, **arguments):
    """A model whose construction fails on one rank with something that is not the user's to mend."""
    if Launch.from_environment(os.environ).rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    from hydssp.models import mlp

    return mlp(**arguments)


def hanging_model(rank: int = 2, **arguments):
    """A model whose construction does not come back on one rank."""
    if Launch.from_environment(os.environ).rank == rank:
        time.sleep(1000)
    from hydssp.models import mlp

    return mlp(**arguments)


def data_of_one_rank_missing():
    """The digits, but for rank 2."""
    from hydssp.data import digits
    from hydssp.errors import UserError

    if Launch.from_environment(os.environ).rank == 2:
        raise UserError("data.root=nowhere: there are no data")
    return digits()


def model_of_another_size(**arguments):
    """On rank 2 the model is larger."""
    from hydssp.models import mlp

    is_other = Launch.from_environment(os.environ).rank == 2
    return mlp(**{**arguments, "hidden": [65] if is_other else [64]})


class BreaksAt700:
    """The training data of the digits, as a data set of the user's with one file that is damaged."""

    def __init__(self) -> None:
        from hydssp.data import digits

        self.part = digits().train

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int):
        if index == 700:
            raise OSError(f"image {index}.png is truncated")
        return torch.from_numpy(self.part.images[index] / 16), int(self.part.labels[index])


def data_with_a_damaged_file():
    """Training data of which one sample cannot be read."""
    from types import SimpleNamespace

    from hydssp.data import digits

    return SimpleNamespace(train=BreaksAt700(), test=digits().test)
