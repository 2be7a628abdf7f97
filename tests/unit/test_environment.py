"""environment.json, the rank map and the log files."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
import warnings

import pytest

from hydssp.errors import UserError
from hydssp.observe import environment
from hydssp.observe.environment import collect, git_revision, rank_facts, rank_map
from hydssp.observe.logs import configure_logging, remove_logging

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_collect_is_json_and_names_versions(tmp_path):
    ranks = [rank_facts(1, "worker", "cuda:0"), rank_facts(0, "server", "cpu")]
    facts = collect(
        ["train.py", "epochs=1"],
        mpi_vendor="Open MPI 5.0.11",
        mpi_library="Open MPI v5\x00",
        directory=tmp_path,
        ranks=ranks,
    )
    facts = json.loads(json.dumps(facts, allow_nan=False))
    assert facts["argv"] == ["train.py", "epochs=1"]
    assert facts["versions"]["python"] == platform.python_version()
    assert set(facts["versions"]) == {"python", "hydssp", "torch", "numpy", "mpi4py"}
    assert facts["versions"]["numpy"]
    assert facts["mpi"] == {"vendor": "Open MPI 5.0.11", "library": "Open MPI v5"}
    assert facts["cpu_count"] >= 1
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 1]


def test_collect_imports_neither_torch_nor_mpi():
    code = (
        "import sys; from hydssp.observe import environment, recorder, run_folder, logs, progress; "
        "environment.collect([]); "
        "print([name for name in ('torch', 'mpi4py', 'rich', 'hydra') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_package_has_no_version():
    assert environment.package_version("no-such-package-here") is None


def make_repository(path, head="ref: refs/heads/main\n"):
    (path / ".git" / "refs" / "heads").mkdir(parents=True)
    (path / ".git" / "HEAD").write_text(head)
    return path / ".git"


def test_git_revision_from_a_branch_a_packed_branch_and_a_bare_commit(tmp_path):
    git = make_repository(tmp_path)
    (tmp_path / "sub").mkdir()
    assert git_revision(tmp_path) is None  # no commit yet
    (git / "packed-refs").write_text(f"# pack-refs\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/main\n")
    assert git_revision(tmp_path / "sub") == COMMIT
    (git / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    assert git_revision(tmp_path) == "a" * 40
    (git / "HEAD").write_text(COMMIT + "\n")
    assert git_revision(tmp_path) == COMMIT


def test_git_revision_of_a_worktree(tmp_path):
    (tmp_path / "main").mkdir()
    git = make_repository(tmp_path / "main")
    (git / "refs" / "heads" / "topic").write_text(COMMIT + "\n")
    place = git / "worktrees" / "topic"
    place.mkdir(parents=True)
    (place / "HEAD").write_text("ref: refs/heads/topic\n")
    (place / "commondir").write_text("../..\n")
    (tmp_path / "topic").mkdir()
    (tmp_path / "topic" / ".git").write_text(f"gitdir: {place}\n")
    assert git_revision(tmp_path / "topic") == COMMIT


def test_git_revision_never_fails(tmp_path):
    git = make_repository(tmp_path)
    (git / "HEAD").unlink()
    assert git_revision(tmp_path) is None
    (git / "HEAD").write_bytes(b"\xff\xfe\x00")
    assert git_revision(tmp_path) is None
    assert git_revision(tmp_path / "missing" / "folder") is None


def fact(rank, host, device="cpu"):
    return {"rank": rank, "role": "worker" if rank else "server", "host": host, "device": device}


def test_few_ranks_get_a_line_each():
    text, ranks = rank_map([fact(2, "node02", "cuda:1"), fact(0, "login1"), fact(1, "node02", "cuda:0")])
    assert text.splitlines() == [
        "rank 0  server -> login1 -> cpu",
        "rank 1  worker -> node02 -> cuda:0",
        "rank 2  worker -> node02 -> cuda:1",
    ]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]


def test_many_ranks_are_drawn_together_by_host():
    facts = [fact(0, "node00")]
    facts += [fact(1 + i, f"node{i // 8:02d}", f"cuda:{i % 4}") for i in range(24)]
    facts[24] = fact(24, "node02", "cpu")
    text, ranks = rank_map(facts)
    assert text.splitlines() == [
        "rank 0      server -> node00 -> cpu",
        "rank 1-8    worker -> node00 -> cuda:0-3",
        "rank 9-16   worker -> node01 -> cuda:0-3",
        "rank 17-24  worker -> node02 -> cpu, cuda:0-3",
    ]
    assert len(ranks) == 25


def test_ranks_dealt_in_turn_are_not_merged():
    lines = rank_map([fact(i, f"node{i % 2}") for i in range(20)]).text.splitlines()
    assert len(lines) == 20


def test_no_ranks_make_an_empty_map():
    assert rank_map([]) == ("", [])


@pytest.fixture
def logging_removed():
    yield
    remove_logging()


def test_each_rank_logs_to_its_file_and_only_rank_0_to_the_console(tmp_path, capsys, logging_removed):
    for rank in (0, 3):
        configure_logging(rank, tmp_path / "logs" / f"rank_{rank:04d}.log", "INFO")
        logging.getLogger("hydssp.server").info("quiet")
        logging.getLogger("hydssp.server").debug("hidden")
        logging.getLogger("some.user.model").warning("loud from %d", rank)
    console = capsys.readouterr()
    assert console.err.splitlines() == ["WARNING: loud from 0"]
    assert console.out == ""
    text = (tmp_path / "logs" / "rank_0003.log").read_text()
    assert "quiet" in text
    assert "loud from 3" in text
    assert "rank 3" in text
    assert "hidden" not in text
    assert "loud from 3" not in (tmp_path / "logs" / "rank_0000.log").read_text()


def test_console_shows_few_of_the_decisions_and_the_file_all(tmp_path, capsys, logging_removed):
    configure_logging(0, tmp_path / "rank_0000.log")
    for number in range(5):
        logging.getLogger("hydssp.coordination").info("worker 1 held (%d)", number)
    assert capsys.readouterr().err.splitlines() == ["INFO: worker 1 held (0)"]
    assert (tmp_path / "rank_0000.log").read_text().count("worker 1 held") == 5


def test_handlers_are_closed_and_levels_restored(tmp_path, logging_removed):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    configure_logging(0, tmp_path / "a.log", "debug")
    added = [handler for handler in root.handlers if handler not in before]
    (file,) = (handler for handler in added if isinstance(handler, logging.FileHandler))
    configure_logging(0, tmp_path / "b.log")
    assert file.stream is None  # closed
    remove_logging()
    remove_logging()
    assert root.handlers == before
    assert root.level == level
    assert logging.getLogger("hydssp").level == logging.NOTSET


def test_python_warnings_go_to_the_log(tmp_path, logging_removed):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging(1, tmp_path / "a.log")
        warnings.warn("odd learning rate", stacklevel=1)
        remove_logging()
    assert "odd learning rate" in (tmp_path / "a.log").read_text()


def test_unknown_level_and_unwritable_file_are_the_users_to_mend(tmp_path, logging_removed):
    with pytest.raises(UserError, match=r"log_level.*CHATTY.*INFO"):
        configure_logging(0, None, "chatty")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run_dir"):
        configure_logging(0, tmp_path / "file" / "rank_0000.log")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_full_disk_costs_the_log_and_neither_the_run_nor_a_traceback(capsys, logging_removed):
    configure_logging(1, "/dev/full")
    logging.getLogger("hydssp").warning("lost")
    remove_logging()
    assert capsys.readouterr().err == ""
