"""What the entry point does before it imports torch or starts MPI."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from hydssp.train import main
code = main()
print("loaded:", *({"torch", "mpi4py"} & set(sys.modules)))
sys.exit(code)
"""


@pytest.mark.parametrize(
    "overrides", [["run_dir=mine"], ["--multirun", "run_dir=${oc.env:MINE}", "seed=0,1"]]
)
def test_a_run_folder_in_use_is_refused_before_torch_and_mpi(tmp_path, monkeypatch, overrides):
    monkeypatch.setenv("MINE", "mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "summary.json").write_text("precious")
    command = [sys.executable, "-c", PROGRAM, "transport=local", "num_workers=2", "runs_dir=runs", *overrides]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("hydssp: run_dir: 'mine' exists") == 1
    assert result.stdout.splitlines()[-1] == "loaded:"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["summary.json"]


@pytest.mark.parametrize(("program", "without"), [("train", {"cluster"}), ("simulate", set())])
def test_help_offers_the_choices_that_there_are(program, without):
    conf = Path(__file__).resolve().parents[2] / "conf"
    there = {
        folder.name: ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        for folder in conf.iterdir()
        if any(folder.glob("*.yaml")) and folder.name not in without
    }
    command = [sys.executable, "-m", f"hydssp.{program}", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    groups, config = result.stdout.split("All keys")
    assert dict(re.findall(r"^(\w+): (.+)$", groups, re.MULTILINE)) == there
    assert "schema" not in result.stdout
    assert "batch_size: 32" in config


def test_no_mpi_library_is_told_in_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "libmpi.so"))
    command = [sys.executable, "-m", "hydssp.train", "epochs=1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("hydssp: no MPI library can be loaded (")
    assert "transport=local num_workers=3" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "mpirun -np 4 python -m hydssp.train paradigm=ds",
            "paradigm=dssp paradigm=dssp_bounded paradigm=dssp_paper",
        ),
        ("python -m hydssp.simulate clus", "cluster. cluster="),
        ("python other.py clus", ""),
    ],
)
def test_command_lines_are_completed(tmp_path, line, expected):
    install = [sys.executable, "-m", "hydssp.train", "-sc", "install=bash"]
    script = subprocess.run(install, capture_output=True, text=True, check=True).stdout
    ask = f"""
COMP_LINE={shlex.quote(line)}
_hydssp_complete {line.split()[0]} {line.split()[-1]} {line.split()[-2]}
echo "${{COMPREPLY[*]}}"
"""
    asked = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, check=True)
    assert asked.stdout.split() == expected.split()


def test_a_key_that_refers_to_a_deleted_one_is_told(tmp_path):
    command = [sys.executable, "-m", "hydssp.train", "transport=local", "~data.shape", "~model.input_shape"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "~model.input_shape: refers to data.shape" in result.stderr
    assert "write it before ~data.shape" in result.stderr
