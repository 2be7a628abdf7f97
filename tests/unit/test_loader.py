"""Loader processes: the same batches, errors as they were raised, nothing left behind."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from loading_samples import NUM_SAMPLES, Oddities, Plain, Witness

from hydssp.data import ArrayDataset, Augment, EpochOrder, digits, shared_pickle
from hydssp.data.batches import Batches, DatasetBatches
from hydssp.data.loader import Loader, LoaderProcessError
from hydssp.data.samples import DatasetSamples, Samples
from hydssp.errors import TrainingError, UserError

pytestmark = pytest.mark.timeout(120)


class Noisy(torch.utils.data.Dataset):
    """A data set of the user's with a random transform."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3) + index, index


class Straight:
    """Batches without any second step."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def finish(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(inputs), torch.tensor(targets)

    def batch(self, indices: np.ndarray, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return self.finish(*self.samples.gather(indices, epoch))


def in_order(samples: Samples, num_processes: int) -> Loader:
    return Loader(Straight(samples), EpochOrder(NUM_SAMPLES, 0, shuffle=False), num_processes)


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "loader_process" in " ".join(p.cmdline())]


@pytest.fixture(autouse=True)
def no_process_left():
    yield
    assert not children()


def test_values_are_the_same_with_any_number_of_processes():
    train, order = digits().train, EpochOrder(1437, seed=3)
    batches = Batches(train, augment=Augment(pad=1, flip=True, seed=3))
    ranges = [(0, 0, 32), (0, 32, 32), (0, 64, 1), (0, 1400, 37), (1, 0, 200), (1, 200, 2), (0, 32, 32)]
    with Loader(batches, order) as own, Loader(batches, order, 2) as two, Loader(batches, order, 3) as three:
        for number, range_ in enumerate(ranges):
            expected = own(*range_)
            for loader in (two, three):
                if number % 2:
                    loader.prefetch(*range_)
                inputs, targets = loader(*range_)
                assert torch.equal(inputs, expected[0])
                assert torch.equal(targets, expected[1])
    assert len(expected[0]) == 32


def test_random_transforms_of_the_users_too():
    batches, order = DatasetBatches(Noisy(), seed=1), EpochOrder(NUM_SAMPLES, 0)
    with Loader(batches, order) as own, Loader(batches, order, 2) as two:
        for epoch, start in ((0, 0), (0, 10), (1, 0)):
            for one, other in zip(own(epoch, start, 10), two(epoch, start, 10), strict=True):
                assert torch.equal(one, other)


def test_a_batch_is_not_overwritten_by_the_next():
    with in_order(Plain(), 2) as loader:
        batches = []
        for start in range(0, NUM_SAMPLES, 5):
            batches.append(loader(0, start, 5)[1])
            loader.prefetch(0, (start + 5) % NUM_SAMPLES, 5)
            loader.prefetch(0, (start + 10) % NUM_SAMPLES, 5)
        assert torch.cat(batches).tolist() == list(range(NUM_SAMPLES))


def test_announced_ranges_need_never_be_asked_for():
    with in_order(Plain(), 2) as loader:
        for start in range(10):
            loader.prefetch(0, start, 4)
        assert loader(0, 20, 4)[1].tolist() == [20, 21, 22, 23]
        assert loader(0, 9, 4)[1].tolist() == [9, 10, 11, 12]
        assert loader(0, 0, 6)[1].tolist() == [0, 1, 2, 3, 4, 5]


def test_prefetching_hides_the_time():
    """Sleeping takes no core, so that the two processes overlap with this one on any machine."""
    with in_order(Plain(0.04), 2) as loader:
        loader(0, 0, 2)
        loader.prefetch(0, 2, 20)
        time.sleep(1.2)
        begun = time.monotonic()
        loader(0, 2, 20)
        assert time.monotonic() - begun < 0.3
        begun = time.monotonic()
        loader(1, 2, 20)
        assert time.monotonic() - begun > 0.39


def test_processes_are_no_forks_and_import_only_what_they_need():
    with in_order(Witness(), 2) as loader:
        rows = loader(0, 0, 4)[0].tolist()
        pids = {row[0] for row in rows}
        assert pids == {process.pid for process in children()}
        assert len(pids) == 2
    # Its own main module, no MPI, no Hydra, no torch; one thread.
    assert [row[1:] for row in rows] == [[os.getpid(), 0, 0, 0, 0, 1]] * 4


def test_modules_are_found_where_the_rank_finds_them(tmp_path, monkeypatch):
    (tmp_path / "samples_of_the_users.py").write_text(
        "class Samples:\n    def gather(self, indices, epoch):\n        return indices + 100, indices\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with in_order(importlib.import_module("samples_of_the_users").Samples(), 1) as loader:
        assert loader(0, 0, 2)[0].tolist() == [100, 101]


def test_what_cannot_be_loaded_there_is_an_error_here(monkeypatch):
    class Ours(Plain):
        pass

    # As a class of the main module: it can be pickled by name, and the name means nothing in another process.
    Ours.__module__, Ours.__qualname__ = "__main__", "Ours"
    monkeypatch.setattr(sys.modules["__main__"], "Ours", Ours, raising=False)
    with (
        in_order(Ours(), 1) as loader,
        pytest.raises(UserError, match=r"loader process 0 cannot load .*Ours"),
    ):
        loader.start()


def test_started_processes_are_ready():
    with in_order(Plain(), 2) as loader:
        loader.start()
        started = children()
        assert len(started) == 2
        loader.start()
        assert loader(0, 3, 2)[1].tolist() == [3, 4]
        assert children() == started


@pytest.mark.parametrize("prefetched", [False, True])
def test_an_error_is_raised_in_the_rank_with_its_traceback(prefetched):
    with in_order(Oddities(), 2) as loader:
        if prefetched:
            loader.prefetch(0, 2, 2)
        with pytest.raises(UserError, match="sample 3 is bad") as error:
            loader(0, 2, 2)
        assert isinstance(error.value.__cause__, LoaderProcessError)
        assert "in gather" in str(error.value.__cause__)
        assert 'raise UserError("data: sample 3 is bad")' in str(error.value.__cause__)
        assert loader(0, 0, 3)[1].tolist() == [0, 1, 2]


class Broken:
    """A data set of the user's."""

    def __getitem__(self, index):
        return {3: [1.0, 2.0, 3.0], 4: "no number"}[index], 0


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_sample_that_cannot_be_read_is_named_and_only_the_users_part_of_the_traceback_kept(num_processes):
    with in_order(DatasetSamples(Broken()), num_processes) as loader:
        with pytest.raises(TrainingError) as error:
            loader(0, 4, 2)
        assert str(error.value) == "data: reading sample 5 of Broken failed with KeyError: 5"
        trace = "".join(traceback.format_exception(error.value.__cause__))
        assert "in __getitem__" in trace
        assert "in gather" not in trace
        assert ("in a loader process" in trace) == bool(num_processes)
        with pytest.raises(TrainingError, match="samples 3, 4 of Broken cannot be joined to a batch: "):
            loader(0, 3, 2)


def test_objects_cannot_be_handed_over():
    with in_order(Oddities(), 1) as loader, pytest.raises(TypeError, match="a batch of object"):
        loader(0, 7, 1)


@pytest.mark.parametrize(("sample", "name"), [(4, "CannotBePickledError"), (6, "CannotBeUnpickledError")])
def test_an_error_that_cannot_travel_is_raised_as_text(sample, name):
    with in_order(Oddities(), 1) as loader:
        with pytest.raises(RuntimeError, match="making a batch failed") as error:
            loader(0, sample, 1)
        assert name in str(error.value.__cause__)


def test_a_process_that_dies_is_reported():
    with in_order(Oddities(), 2) as loader:
        with pytest.raises(TrainingError, match=r"loader process 0 of this rank .*SIGKILL.*short of memory"):
            loader(0, 5, 2)
        with pytest.raises(TrainingError, match="loader process 0"):
            loader(0, 0, 2)


def test_a_class_that_cannot_be_imported_there_is_an_error_here():
    class Local(Plain):
        pass

    with pytest.raises(UserError, match=r"data\.loader_workers=1: .*no lambdas"):
        in_order(Local(), 1)


@pytest.mark.parametrize("number", [-1, 1.5, True, "2"])
def test_the_number_of_processes_is_checked(number):
    with pytest.raises(UserError, match=r"data\.loader_workers is .*integer from 0"):
        in_order(Plain(), number)


def test_closing_ends_processes_at_once_and_may_be_repeated():
    loader = in_order(Plain(60), 2)
    loader.prefetch(0, 0, 4)
    processes = children()
    assert len(processes) == 2
    descriptors = psutil.Process().num_fds()
    begun = time.monotonic()
    loader.close()
    loader.close()
    assert time.monotonic() - begun < 5
    assert not any(process.is_running() for process in processes)
    assert psutil.Process().num_fds() < descriptors


def test_a_loader_that_is_forgotten_ends_its_processes():
    loader = in_order(Plain(60), 1)
    loader.prefetch(0, 0, 4)
    processes = children()
    del loader
    assert not any(process.is_running() for process in processes)


RANK = textwrap.dedent(
    """
    import sys, time
    from hydssp.data import EpochOrder
    from hydssp.data.batches import DatasetBatches
    from hydssp.data.loader import Loader
    from test_loader import NUM_SAMPLES, Plain, children

    loader = Loader(DatasetBatches(Plain(float(sys.argv[1]))), EpochOrder(NUM_SAMPLES, 0), 2)
    loader.prefetch(0, 0, 4)
    print(*(process.pid for process in children()), flush=True)
    if sys.argv[2] == "wait":
        time.sleep(600)
    """
)


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["idle", "busy"])
@pytest.mark.parametrize("end", ["wait", "return"])
def test_processes_end_with_the_rank_however_it_ends(seconds, end):
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(seconds), end],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert rank.stdout is not None
    pids = [int(word) for word in rank.stdout.readline().split()]
    assert len(pids) == 2
    if end == "wait":
        time.sleep(0.3)
        rank.kill()
    assert rank.wait(30) == (-signal.SIGKILL if end == "wait" else 0)
    rank.stdout.close()
    deadline = time.monotonic() + 10
    while remaining := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{remaining} are left"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """A process whose parent is gone may stay as a zombie where nobody collects it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_too_few_cores_are_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with caplog.at_level(logging.WARNING), in_order(Plain(), 2) as loader:
        loader(0, 0, 2)
        loader(0, 2, 2)
    (record,) = caplog.records
    assert "data.loader_workers=2" in record.getMessage()
    assert "only 2 core(s)" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.WARNING), in_order(Plain(), 1) as loader:
        loader(0, 0, 2)
    assert not caplog.records


def test_without_processes_nothing_is_started_and_announcing_does_nothing():
    with in_order(Plain(), 0) as loader:
        loader.prefetch(0, 0, 4)
        assert loader(0, 0, 4)[1].tolist() == [0, 1, 2, 3]
        assert not children()


# --- arrays are shared, not copied ---


def dump(value: object) -> tuple[int, int, int]:
    memory = shared_pickle.nameless_memory()
    return memory, *shared_pickle.dump(value, memory)


def test_large_arrays_are_not_in_the_pickle():
    array = np.random.default_rng(0).integers(0, 255, (1000, 100), dtype=np.uint8)
    memory, offset, size = dump({"large": array, "again": array, "small": np.arange(3)})
    try:
        assert size < 2000
        assert offset + size < array.nbytes + 4096
        first, second = (shared_pickle.load(memory, offset, size) for _ in range(2))
        np.testing.assert_array_equal(first["large"], array)
        assert first["small"].tolist() == [0, 1, 2]
        assert first["again"] is first["large"]
        first["large"][:] = 0  # its own, as after any pickle
        np.testing.assert_array_equal(second["large"], array)
    finally:
        os.close(memory)


@pytest.mark.parametrize("piece", [slice(None), slice(500), slice(500, 900)], ids=str)
def test_mapped_arrays_are_mapped_again(tmp_path, piece):
    array = np.arange(1000 * 100).reshape(1000, 100)
    np.save(tmp_path / "array.npy", array)
    mapped = np.load(tmp_path / "array.npy", mmap_mode="r")[piece]
    memory, offset, size = dump(mapped)
    try:
        assert os.fstat(memory).st_size < 2000
        loaded = shared_pickle.load(memory, offset, size)
        assert isinstance(loaded, np.memmap)
        np.testing.assert_array_equal(loaded, array[piece])
    finally:
        os.close(memory)


def test_what_is_no_longer_in_the_file_is_copied(tmp_path):
    array = np.arange(1000.0 * 100).reshape(1000, 100)
    np.save(tmp_path / "array.npy", array)
    private = np.load(tmp_path / "array.npy", mmap_mode="c")
    private[0, 0] = -1
    values = [np.load(tmp_path / "array.npy", mmap_mode="r") + 1, private, private.T, array[:, ::2]]
    memory, offset, size = dump(values)
    try:
        for one, other in zip(shared_pickle.load(memory, offset, size), values, strict=True):
            np.testing.assert_array_equal(one, other)
    finally:
        os.close(memory)


def test_a_large_data_set_reaches_the_processes_through_shared_memory():
    images = np.random.default_rng(1).integers(0, 256, (500, 3, 32, 32), dtype=np.uint8)
    dataset = ArrayDataset(images, np.arange(500), (0.0,) * 3, (1.0,) * 3, num_classes=500)
    order = EpochOrder(500, 0)
    with Loader(Batches(dataset), order, 2) as loader:
        inputs, targets = loader(0, 100, 50)
    assert targets.tolist() == order.indices(0, 100, 50).tolist()
    np.testing.assert_allclose(inputs.numpy() * 255, images[targets.numpy()], atol=1e-4)
