"""``python -m hydssp.data``: what it says, its exit codes, what it writes and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_cifar import write_miniature

from hydssp.data import cifar, cifar10
from hydssp.data.__main__ import BUILT_IN, main
from hydssp.errors import UserError


def test_list_names_all_with_their_keys(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BUILT_IN)
    assert "root, limit, verify, cache" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "digits"], ["1,437 images of shape [1, 8, 8]", "360 images", "10 classes"]),
        (["prepare", "digits"], ["1,437 images"]),
        (
            ["check", "synthetic", "shape=[2,4,4]", "data.num_samples=30", "num_classes=3", "separation=1.5"],
            ["30 images of shape [2, 4, 4], 3 classes with 10 each"],
        ),
        (
            ["check", "test_data_command.own", "size=3"],
            ["3 samples, list: each int and int", "1 samples, list: each int and int"],
        ),
        (
            ["check", "test_data_command.Uneven"],
            ["2 samples, Uneven: the first float32 [2] and int, the last float32 [3] and int"],
        ),
    ],
)
def test_check_describes(capsys, arguments, words):
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert all(word in captured.out for word in words), captured.out
    assert not captured.err


def own(size: int):
    from types import SimpleNamespace

    if size > 10:
        raise LookupError("there are ten files")
    return SimpleNamespace(train=[(0, 0)] * size, test=[(0, 0)])


class Uneven:
    """Samples of different lengths; its own training and test data."""

    def __init__(self, damaged: int = -1) -> None:
        self.train = self.test = self
        self.damaged = damaged

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int):
        if index == self.damaged:
            raise OSError(f"{index}.png is truncated")
        return np.zeros(2 + index, np.float32), index


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "cifar"], ["no data set cifar", "cifar100"]),
        (["check", "digits", "limit=3"], ["'limit=3' is no setting", "it has none"]),
        (["check", "cifar10", "rot=here"], ["'rot=here'", "root, limit, verify, cache"]),
        (["check", "cifar10", "root"], ["'root' is no setting"]),
        (["check", "synthetic", "shape=[1]"], ["data.shape is [1]"]),
        (["check", "nothing.at_all"], ["nothing.at_all cannot be imported"]),
        (["check", "hydssp.nothing"], ["hydssp.nothing cannot be imported"]),
        (["check", "test_data_command.own"], ["size", "missing"]),
        (["check", "test_data_command.own", "size=0"], ["train is empty"]),
        (
            ["check", "test_data_command.own", "size=11"],
            ["size=11", "LookupError: there are ten files", "py:"],
        ),
        (["check", "test_data_command.own", "size=x"], ["test_data_command.own with size=x", "TypeError"]),
        (
            ["check", "test_data_command.Uneven", "damaged=1"],
            ["sample 1 of Uneven", "OSError: 1.png is truncated"],
        ),
        (["check", "synthetic", "num_samples=x"], ["num_samples"]),
        (["check", "own_broken.data"], ["own_broken.data cannot be imported: SyntaxError"]),
        (["check", "builtins.iter"], ["builtins.iter"]),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, words):
    (tmp_path / "own_broken.py").write_text("def data(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("hydssp: data")
    assert all(word in captured.err for word in words), captured.err
    assert not captured.out


def test_absent_data_are_reported_as_in_a_job(capsys, tmp_path):
    assert main(["check", "cifar10", f"root={tmp_path}"]) == 2
    with pytest.raises(UserError) as error:
        cifar10(root=tmp_path)
    assert capsys.readouterr().err == f"hydssp: {error.value}\n"


def test_check_writes_nothing_and_prepare_what_a_job_needs(capsys, tmp_path, monkeypatch):
    write_miniature(tmp_path, cifar.CIFAR100)
    before = sorted(tmp_path.rglob("*"))
    assert main(["check", "cifar100", f"data.root={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert "none yet" in out
    assert "published is 16019d7e3df5f24257cddd939b257f8d" in out
    assert "20 images of shape [3, 32, 32], 100 classes" in out

    assert main(["prepare", "cifar100", f"root={tmp_path}", "limit=null", "verify=False"]) == 0
    assert "hydssp-cache" in capsys.readouterr().out
    monkeypatch.setattr(cifar, "_read", lambda *_: pytest.fail("converted again"))
    assert len(cifar.cifar100(tmp_path).train) == 20
    assert main(["check", "cifar100", f"root={tmp_path}"]) == 0
    assert "none yet" not in capsys.readouterr().out

    assert main(["check", "cifar100", f"root={tmp_path}", "verify=true"]) == 2
    assert "data.verify=false" in capsys.readouterr().err


def test_it_imports_neither_torch_nor_mpi_nor_hydra(tmp_path: Path):
    write_miniature(tmp_path, cifar.CIFAR10)
    code = (
        "import sys; from hydssp.data.__main__ import main; "
        f"code = main(['prepare', 'cifar10', {f'root={tmp_path}'!r}]); "
        "print(*sys.modules); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(result.stdout.split()) & {"torch", "mpi4py", "hydra", "omegaconf"}


def test_wrong_usage_ends_with_2():
    command = [sys.executable, "-m", "hydssp.data"]
    assert subprocess.run([*command, "chek", "digits"], capture_output=True, check=False).returncode == 2
    result = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "check" in result.stdout
