"""The run folder is claimed once, and its files are replaced whole."""

from __future__ import annotations

import os
import stat
from datetime import datetime

import pytest

from hydssp.errors import UserError
from hydssp.observe.run_folder import RunFolder, check_run_folder, create_run_folder, write_atomically

NOW = datetime(2026, 3, 4, 15, 6, 7)


def test_default_folder_is_named_after_date_time_and_paradigm(tmp_path):
    folder = create_run_folder(None, tmp_path / "runs", "dssp", NOW)
    assert folder.path == tmp_path / "runs" / "2026-03-04_150607_dssp"
    assert folder.logs.is_dir()
    assert [path.name for path in folder.path.iterdir()] == [
        "logs"
    ]  # no empty folder for what may never come
    assert folder.log(12) == folder.path / "logs" / "rank_0012.log"
    names = [folder.config, folder.summary, folder.metrics, folder.events, folder.environment, folder.weights]
    assert [path.name for path in names] == [
        "config.yaml",
        "summary.json",
        "metrics.jsonl",
        "events.jsonl",
        "environment.json",
        "weights.pt",
    ]


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    names = [create_run_folder(None, tmp_path, "ssp", NOW).path.name for _ in range(3)]
    assert names == ["2026-03-04_150607_ssp", "2026-03-04_150607_ssp_2", "2026-03-04_150607_ssp_3"]


def test_label_with_awkward_characters_stays_one_folder_below_base(tmp_path):
    folder = create_run_folder(None, tmp_path, "../ssp (s=3)/", NOW)
    assert folder.path.parent == tmp_path
    assert folder.path.name == "2026-03-04_150607_ssp-s-3"


def test_explicit_folder_may_be_missing_or_empty(tmp_path):
    assert create_run_folder(tmp_path / "a" / "b", "unused", "bsp", NOW).path == tmp_path / "a" / "b"
    (tmp_path / "empty").mkdir()
    assert create_run_folder(str(tmp_path / "empty"), "unused", "bsp", NOW).logs.is_dir()


def test_explicit_folder_of_another_run_is_refused_and_left_alone(tmp_path):
    create_run_folder(tmp_path / "mine", "unused", "bsp", NOW)
    with pytest.raises(UserError, match=r"run_dir.*mine"):
        create_run_folder(tmp_path / "mine", "unused", "bsp", NOW)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "paper.txt").write_text("x")
    with pytest.raises(UserError, match=r"run_dir.*notes"):
        create_run_folder(tmp_path / "notes", "unused", "bsp", NOW)
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["paper.txt"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="run_dir"):
        create_run_folder(tmp_path / "file", "unused", "bsp", NOW)
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_can_be_looked_at_without_being_claimed(tmp_path):
    (tmp_path / "empty").mkdir()
    for free in ("new/one", "empty"):
        check_run_folder(tmp_path / free)
    assert os.listdir(tmp_path) == ["empty"]
    create_run_folder(tmp_path / "mine", "unused", "bsp", NOW)
    (tmp_path / "file").write_text("x")
    for taken in ("mine", "file"):
        with pytest.raises(UserError, match=f"run_dir.*{taken}.*never overwrites"):
            check_run_folder(str(tmp_path / taken))


def test_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="run_dir"):
        create_run_folder(None, tmp_path / "file" / "runs", "bsp", NOW)


@pytest.mark.parametrize("is_durable", [True, False])
def test_write_atomically_replaces_and_leaves_nothing_else(tmp_path, is_durable):
    path = tmp_path / "summary.json"
    write_atomically(path, "old", is_durable=is_durable)
    write_atomically(path, "grün", is_durable=is_durable)
    assert path.read_bytes() == "grün".encode()
    write_atomically(path, b"\x00\x01", is_durable=is_durable)
    assert path.read_bytes() == b"\x00\x01"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_failed_write_keeps_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def fail(source, target):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=r"no space left: .*summary\.json'"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_written_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_constructing_a_run_folder_makes_nothing(tmp_path):
    assert not RunFolder(tmp_path / "later").path.exists()
