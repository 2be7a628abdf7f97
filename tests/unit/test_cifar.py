"""CIFAR from the user's disk, and the cache of arrays that the ranks of a node share."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hydssp.data import array_cache, cifar, cifar10, cifar100
from hydssp.data.array_cache import ArrayCache
from hydssp.data.batches import Batches
from hydssp.errors import UserError

CASES = [(cifar.CIFAR10, cifar10), (cifar.CIFAR100, cifar100)]
PER_FILE = 20


def write_miniature(root: Path, spec: cifar.Spec, seed: int = 0) -> dict[str, tuple[np.ndarray, list[int]]]:
    """The files of a data set with 20 random images each; returns the arrays by file name."""
    rng = np.random.default_rng(seed)
    folder = root / spec.folder
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for file in spec.files:
        data = rng.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
        labels = rng.integers(0, spec.num_classes, PER_FILE).tolist()
        content = {"data": data, spec.labels_key: labels, "filenames": ["x.png"] * PER_FILE}
        (folder / file).write_bytes(pickle.dumps(content, protocol=2))
        written[file] = data, labels
    return written


def as_python_2_wrote(data: np.ndarray, labels: list[int], labels_key: str) -> bytes:
    """A pickle as of 2009: byte strings, the old module path, 0 and 1 for the flags of the dtype."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    raw = data.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + number(data.shape[0]) + number(data.shape[1]) + b"\x86" + dtype
    array += b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    items = text(b"data") + array + text(labels_key.encode()) + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + items + b"u."


@pytest.fixture(autouse=True)
def private_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmpdir"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


# --- reading ---


@pytest.mark.parametrize(("spec", "load"), CASES)
@pytest.mark.parametrize("below", ["", "folder"])
def test_arrays_are_those_of_the_files(tmp_path, spec, load, below):
    written = write_miniature(tmp_path, spec)
    splits = load(root=tmp_path / spec.folder if below else str(tmp_path))
    for part, files in ((splits.train, spec.train), (splits.test, spec.test)):
        data = np.concatenate([written[file][0] for file in files])
        np.testing.assert_array_equal(part.images.reshape(-1, 3072), data)
        assert part.labels.tolist() == [label for file in files for label in written[file][1]]
        assert part.shape == (3, 32, 32)
        assert part.num_classes == spec.num_classes
        assert (part.mean, part.std) == (spec.mean, spec.std)


def test_colours_are_planes_of_rows(tmp_path):
    """The first 1,024 bytes of a row are red, the first 32 of them the uppermost line."""
    data, _ = write_miniature(tmp_path, cifar.CIFAR10)["data_batch_1"]
    images = cifar10(tmp_path).train.images
    assert images[0, 0, 0, 31] == data[0, 31]
    assert images[0, 2, 1, 0] == data[0, 2048 + 32]


def test_files_of_python_2(tmp_path, recwarn):
    written = write_miniature(tmp_path, cifar.CIFAR10)
    for file, (data, labels) in written.items():
        path = tmp_path / cifar.CIFAR10.folder / file
        path.write_bytes(as_python_2_wrote(data, labels, "labels"))
    images = cifar10(tmp_path).train.images
    np.testing.assert_array_equal(images[:PER_FILE].reshape(-1, 3072), written["data_batch_1"][0])
    assert not recwarn.list


def test_limit_takes_the_first_training_images(tmp_path):
    write_miniature(tmp_path, cifar.CIFAR10)
    whole, part = cifar10(tmp_path), cifar10(tmp_path, limit=7)
    np.testing.assert_array_equal(part.train.images, whole.train.images[:7])
    assert (len(part.train), len(part.test)) == (7, PER_FILE)
    with pytest.raises(UserError, match=r"data\.limit is 101; allowed is 1 to 100"):
        cifar10(tmp_path, limit=101)


@pytest.mark.parametrize(("spec", "load"), CASES)
def test_absent_says_all_there_is_to_know(tmp_path, spec, load):
    write_miniature(tmp_path, spec)
    gone = [*spec.files][-1]
    (tmp_path / spec.folder / gone).unlink()
    with pytest.raises(UserError) as error:
        load(root=tmp_path)
    inside, itself = str(error.value).splitlines()[1:3]
    assert str(tmp_path / spec.folder) in inside
    assert inside.endswith(f"missing {gone}")
    assert f"missing {', '.join(spec.files)}" in itself
    hints = [
        spec.title,
        "data.root=",
        f"tar -xzf {spec.archive}",
        f"{spec.archive_bytes:,}",
        "before the job",
    ]
    for hint in [*hints, spec.archive_md5, "Nothing is downloaded", f"check {spec.name}"]:
        assert hint in str(error.value)
    with pytest.raises(UserError, match=r"data\.root is not set"):
        load()
    with pytest.raises(UserError, match="no such folder"):
        load(root="nowhere")


class Foreign:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_cannot_run_anything(tmp_path):
    write_miniature(tmp_path, cifar.CIFAR10)
    evil = tmp_path / cifar.CIFAR10.folder / "data_batch_3"
    evil.write_bytes(pickle.dumps({"data": Foreign(tmp_path / "made")}, protocol=2))
    with pytest.raises(UserError, match=r"data_batch_3 asks for (posix|os)\.mkdir.*it was not run"):
        cifar10(tmp_path)
    assert not (tmp_path / "made").exists()


GOOD = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 9]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no pickle", "is no pickle of CIFAR-10"),
        (pickle.dumps(GOOD, protocol=2)[:200], "is no pickle of CIFAR-10"),
        (pickle.dumps([1, 2]), r"has no 'data' of bytes \[N, 3072\]"),
        (pickle.dumps({**GOOD, "data": np.zeros((2, 784), np.uint8)}, 2), "has no 'data'"),
        (pickle.dumps({**GOOD, "data": np.zeros((2, 3072))}, 2), "has no 'data'"),
        (pickle.dumps({**GOOD, "labels": [1]}, 2), "no list 'labels' with a number of 0 to 9"),
        (pickle.dumps({**GOOD, "labels": [1, 10]}, 2), "0 to 9"),
        (pickle.dumps({"data": GOOD["data"], "fine_labels": [1, 2]}, 2), "no list 'labels'"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, message):
    write_miniature(tmp_path, cifar.CIFAR10)
    path = tmp_path / cifar.CIFAR10.folder / "test_batch"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        cifar10(tmp_path)
    assert str(path) in str(error.value)
    assert not list(tmp_path.rglob("*.npy"))


def test_verify_compares_with_the_published_sums(tmp_path, monkeypatch):
    write_miniature(tmp_path, cifar.CIFAR10)
    cifar10(tmp_path)
    folder = tmp_path / cifar.CIFAR10.folder
    for _ in range(2):
        with pytest.raises(UserError, match=r"test_batch has MD5 \w{32} instead of 4035.*data\.verify=false"):
            cifar10(tmp_path, verify=True)
    sums = {f: hashlib.md5((folder / f).read_bytes()).hexdigest() for f in cifar.CIFAR10.files}
    train = {f: sums[f] for f in cifar.CIFAR10.train}
    good = replace(cifar.CIFAR10, train=train, test={"test_batch": sums["test_batch"]})
    assert cifar.load(good, tmp_path, verify=True).md5 == sums


# --- the cache ---


def entries(place: Path) -> list[str]:
    return sorted(p.name for p in place.iterdir() if not p.name.endswith(".lock"))


def test_arrays_are_mapped_from_beside_the_files(tmp_path, monkeypatch):
    write_miniature(tmp_path, cifar.CIFAR10)
    first = cifar.load(cifar.CIFAR10, tmp_path)
    assert first.cache is not None
    assert first.cache.parent == tmp_path / cifar.CIFAR10.folder / "hydssp-cache"
    monkeypatch.setattr(cifar, "_read", lambda *_: pytest.fail("converted again"))
    images = cifar10(tmp_path).train.images
    assert isinstance(images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        images[0] = 0
    x_BCHW, _ = Batches(cifar10(tmp_path).train).batch(np.arange(3))  # noqa: N806
    assert torch.isfinite(x_BCHW).all()
    assert [p.suffix for p in sorted(first.cache.iterdir())] == [".json"] + [".npy"] * 4


def test_changed_files_get_a_new_entry(tmp_path):
    write_miniature(tmp_path, cifar.CIFAR10, seed=0)
    old = cifar10(tmp_path)
    time.sleep(0.01)
    new = write_miniature(tmp_path, cifar.CIFAR10, seed=1)["test_batch"][0]
    np.testing.assert_array_equal(cifar10(tmp_path).test.images.reshape(-1, 3072), new)
    assert not np.array_equal(old.test.images.reshape(-1, 3072), new)


def test_the_folder_may_be_named(tmp_path):
    write_miniature(tmp_path, cifar.CIFAR10)
    loaded = cifar.load(cifar.CIFAR10, tmp_path, cache=tmp_path / "a" / "b")
    assert loaded.cache is not None
    assert loaded.cache.parent == tmp_path / "a" / "b"
    assert not (tmp_path / cifar.CIFAR10.folder / "hydssp-cache").exists()


def test_without_leave_to_write_the_arrays_are_in_memory(tmp_path):
    write_miniature(tmp_path, cifar.CIFAR10)
    loaded = cifar.load(cifar.CIFAR10, tmp_path, may_write=False)
    assert loaded.cache is None
    assert not isinstance(loaded.splits.train.images, np.memmap)
    assert not list(tmp_path.rglob("hydssp-cache"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "file").write_text("x")
    return folder


def make() -> tuple[dict[str, np.ndarray], dict]:
    return {"numbers": np.arange(5)}, {"note": 1}


def test_a_folder_that_cannot_be_written_to_is_replaced_by_a_private_one(source, private_tmpdir):
    (source / "hydssp-cache").write_text("a file, where no folder can be made")
    content = ArrayCache("some", source, ["file"]).fetch(make)
    private = private_tmpdir / f"hydssp-{os.getuid()}"
    assert content.folder.parent == private
    assert private.stat().st_mode & 0o777 == 0o700
    assert content.arrays["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert content.facts == {"note": 1}
    found = ArrayCache("some", source, ["file"]).find()
    assert found is not None


def test_a_private_folder_of_someone_else_is_not_used(source, private_tmpdir):
    (source / "hydssp-cache").write_text("")
    private = private_tmpdir / f"hydssp-{os.getuid()}"
    private.mkdir()
    private.chmod(0o777)
    with pytest.raises(UserError, match="others may write to it") as error:
        ArrayCache("some", source, ["file"]).fetch(make)
    assert str(source / "hydssp-cache") in str(error.value)
    assert "data.cache=FOLDER" in str(error.value)


def test_a_full_disk_leaves_nothing_behind(source, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="No space left"):
        ArrayCache("some", source, ["file"], cache=source / "c").fetch(make)
    assert entries(source / "c") == []


def test_what_the_reader_raises_passes_through_and_leaves_nothing(source):
    def refuse():
        raise UserError("not this file")

    with pytest.raises(UserError, match="not this file"):
        ArrayCache("some", source, ["file"]).fetch(refuse)
    assert entries(source / "hydssp-cache") == []


@pytest.mark.parametrize("damage", ["cut", "gone", "facts"])
def test_a_damaged_entry_is_named(source, damage):
    cache = ArrayCache("some", source, ["file"])
    folder = cache.fetch(make).folder
    if damage == "cut":
        os.truncate(folder / "numbers.npy", 140)
    elif damage == "gone":
        (folder / "numbers.npy").unlink()
    else:
        (folder / "facts.json").write_text("{}")
    with pytest.raises(UserError, match="is damaged .*delete this folder") as error:
        cache.fetch(make)
    assert str(folder) in str(error.value)


def test_a_holder_that_hangs_is_not_waited_for_for_ever(source, monkeypatch):
    monkeypatch.setattr(array_cache, "PATIENCE_S", 0.2)
    cache = ArrayCache("some", source, ["file"])
    (source / "hydssp-cache").mkdir()
    with (source / "hydssp-cache" / f".{cache.entry}.lock").open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert cache.fetch(make).arrays["numbers"].tolist() == [0, 1, 2, 3, 4]


def test_a_file_system_without_locks_will_do(source, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert ArrayCache("some", source, ["file"]).fetch(make).facts == {"note": 1}


PROCESS = textwrap.dedent(
    """
    import os, sys, time
    import numpy as np
    from hydssp.data.array_cache import ArrayCache

    def make():
        with open(sys.argv[2], "a") as file:
            file.write("made\\n")
        if sys.argv[3] == "hang":
            print("has the lock", flush=True)
            time.sleep(600)
        time.sleep(0.3)
        return {"numbers": np.arange(5)}, {}

    print(ArrayCache("some", __import__("pathlib").Path(sys.argv[1]), ["file"]).fetch(make).arrays["numbers"].sum())
    """
)


def start(source: Path, log: Path, how: str = "make") -> subprocess.Popen:
    command = [sys.executable, "-c", PROCESS, str(source), str(log), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_several_ranks_at_once_convert_once(source, tmp_path):
    processes = [start(source, tmp_path / "log") for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert outputs == ["10\n"] * 4
    assert (tmp_path / "log").read_text() == "made\n"
    assert len(entries(source / "hydssp-cache")) == 1


def test_a_rank_that_dies_while_converting_holds_nobody_up(source, tmp_path):
    holder = start(source, tmp_path / "log", "hang")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "has the lock\n"
    leftover = source / "hydssp-cache" / f".{ArrayCache('some', source, ['file']).entry}.1-ab.part"
    leftover.mkdir()
    waiting = start(source, tmp_path / "log")
    time.sleep(0.5)
    assert waiting.poll() is None
    holder.kill()
    holder.communicate()
    assert waiting.communicate(timeout=30)[0] == "10\n"
    assert not leftover.exists()


@pytest.mark.skipif(
    "HYDSSP_CIFAR10" not in os.environ,
    reason="HYDSSP_CIFAR10 does not name a folder with cifar-10-batches-py",
)
def test_cifar10_real_files(tmp_path):
    splits = cifar10(os.environ["HYDSSP_CIFAR10"], cache=tmp_path / "cache")
    assert (len(splits.train), len(splits.test)) == (50_000, 10_000)
    assert np.bincount(splits.train.labels).tolist() == [5_000] * 10
    assert np.bincount(splits.test.labels).tolist() == [1_000] * 10
    pixels = splits.train.images.transpose(1, 0, 2, 3).reshape(3, -1)
    for channel in range(3):
        histogram = np.bincount(pixels[channel], minlength=256) / pixels.shape[1]
        levels = np.arange(256) / 255
        mean = (histogram * levels).sum()
        std = np.sqrt((histogram * (levels - mean) ** 2).sum())
        # Copies that went through JPEG are a little smoother.
        assert mean == pytest.approx(splits.train.mean[channel], abs=1e-3)
        assert std == pytest.approx(splits.train.std[channel], abs=3e-3)
