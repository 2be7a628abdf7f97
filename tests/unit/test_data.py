"""Data sets, batches, the IDX reader and the order of an epoch."""

from __future__ import annotations

import gzip
import hashlib
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hydssp.data.fashion as fashion
from hydssp.data import (
    ArrayDataset,
    Augment,
    EpochOrder,
    Splits,
    check_splits,
    digits,
    fashion_mnist,
    synthetic,
)
from hydssp.data.batches import Batches, DatasetBatches, make_batches
from hydssp.data.idx import read_idx
from hydssp.errors import UserError


def make_dataset(num_samples: int = 6, channels: int = 2, **changes) -> ArrayDataset:
    rng = np.random.default_rng(0)
    fields = {
        "images": rng.integers(0, 256, (num_samples, channels, 3, 4), dtype=np.uint8),
        "labels": np.arange(num_samples) % 3,
        "mean": (0.25,) * channels,
        "std": (0.5,) * channels,
        "num_classes": 3,
    }
    return ArrayDataset(**{**fields, **changes})


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def write_miniature(folder: Path, num_train: int = 20, num_test: int = 10, gzipped: bool = True) -> dict:
    """The four files of Fashion-MNIST with a few random 28x28 images; returns the arrays by file name."""
    rng = np.random.default_rng(1)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (num_train, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": (np.arange(num_train) % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (num_test, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": (np.arange(num_test) % 10).astype(np.uint8),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        content = idx_bytes(array)
        if gzipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return arrays


@pytest.fixture
def no_debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the Debian location where nothing is."""
    folder = tmp_path / "debian"
    monkeypatch.setattr(fashion, "DEBIAN_FOLDER", folder)
    return folder


# --- ArrayDataset, Splits ---


def test_dataset_says_length_and_image_shape() -> None:
    dataset = make_dataset(num_samples=6, channels=2)
    assert len(dataset) == 6
    assert dataset.shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((6, 2, 3, 4), np.float32)}, r"images are float32"),
        ({"images": np.zeros((6, 3, 4), np.uint8)}, r"needed is uint8 \[N, C, H, W\]"),
        (
            {"images": np.zeros((0, 2, 3, 4), np.uint8), "labels": np.zeros(0, np.int64)},
            r"at least one image",
        ),
        ({"images": np.zeros((6, 4, 3, 2), np.uint8).transpose(0, 3, 2, 1)}, r"ascontiguousarray"),
        ({"labels": np.zeros(6, np.int32)}, r"labels are int32"),
        ({"labels": np.zeros(5, np.int64)}, r"int64 \[6\]"),
        ({"labels": np.array([0, 1, 2, 3, 0, 0])}, r"from 0 to 3; allowed is 0 to 2"),
        ({"labels": np.array([0, 1, 2, -1, 0, 0])}, r"from -1 to 2"),
        ({"mean": (0.5,)}, r"each of the 2 channels"),
        ({"std": (0.5, 0.0)}, r"positive std"),
        ({"max_value": 0}, r"max_value is 0"),
    ],
)
def test_dataset_refuses_arrays_that_do_not_fit(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_dataset(**changes)


@pytest.mark.parametrize("changes", [{"channels": 1}, {"num_classes": 4}])
def test_splits_must_agree(changes: dict) -> None:
    with pytest.raises(UserError, match="both must be the same"):
        Splits(make_dataset(), make_dataset(**changes))


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (SimpleNamespace(train=[1]), "without test"),
        ([1, 2], "a list without train"),
        (SimpleNamespace(train=[1], test=iter([1])), "without __len__ and __getitem__"),
        (SimpleNamespace(train=[1], test={1, 2}), "test is a set without __getitem__"),
        (SimpleNamespace(train=[], test=[1]), "train is empty"),
    ],
)
def test_splits_of_the_users_must_be_map_style(splits: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_splits(splits)


def test_splits_may_be_anything_with_numbered_samples() -> None:
    check_splits(digits())
    check_splits(SimpleNamespace(train=[1, 2], test=make_dataset()))


# --- batches ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_is_normalised_per_channel_and_in_the_asked_order(dtype: torch.dtype) -> None:
    dataset = make_dataset(mean=(0.25, 0.5), std=(0.5, 2.0))
    indices = np.array([4, 0, 4])
    x_BCHW, y_B = Batches(dataset, dtype).batch(indices)  # noqa: N806
    expected = dataset.images[indices] / 255
    expected = (expected - np.array([0.25, 0.5]).reshape(2, 1, 1)) / np.array([0.5, 2.0]).reshape(2, 1, 1)
    assert x_BCHW.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    np.testing.assert_allclose(x_BCHW.numpy(), expected, atol=tolerance, rtol=0)
    assert y_B.dtype == torch.int64
    assert y_B.tolist() == [1, 0, 1]


def test_digits_batches_count_sixteen_as_one() -> None:
    train = digits().train
    x_BCHW, _ = Batches(train, torch.float64).batch(np.arange(5))  # noqa: N806
    expected = (train.images[:5] / 16 - train.mean[0]) / train.std[0]
    np.testing.assert_allclose(x_BCHW.numpy(), expected, atol=1e-14, rtol=0)


def test_batch_is_a_copy_even_of_read_only_data() -> None:
    dataset = make_dataset()
    dataset.images.flags.writeable = False
    before = dataset.images.copy()
    x_BCHW, y_B = Batches(dataset).batch(np.arange(6))  # noqa: N806
    x_BCHW.zero_()
    y_B.fill_(-1)
    np.testing.assert_array_equal(dataset.images, before)
    assert dataset.labels.min() == 0


def test_batch_may_be_empty_but_not_outside() -> None:
    batches = Batches(make_dataset(num_samples=6))
    x_BCHW, y_B = batches.batch(EpochOrder(6, 0).indices(0, 3, 0))  # noqa: N806
    assert x_BCHW.shape == (0, 2, 3, 4)
    assert y_B.shape == (0,)
    with pytest.raises(IndexError):
        batches.batch(np.array([6]))


# --- data sets of the user's ---


class Noisy(torch.utils.data.Dataset):
    """Draws from all three global generators, as transforms do."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(1).item() + 10 * random.random() + 100 * np.random.rand()  # noqa: NPY002
        return torch.tensor([float(index), noise]), index % 3


def test_dataset_batch_is_collated_in_the_asked_order() -> None:
    inputs, targets = make_batches(Noisy(), torch.float64).batch(np.array([4, 0, 8]))
    assert inputs.dtype == torch.float64
    assert inputs[:, 0].tolist() == [4, 0, 8]
    assert targets.dtype == torch.int64
    assert targets.tolist() == [1, 0, 2]


def test_dataset_converts_numbers_with_a_point_only() -> None:
    tokens_and_value = [(torch.tensor([3, 4]), torch.tensor([0.5]))] * 2
    inputs, targets = DatasetBatches(tokens_and_value, torch.float64).batch(np.arange(2))
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.float64)
    assert targets.tolist() == [[0.5], [0.5]]


def test_random_transforms_depend_on_seed_epoch_and_sample_alone() -> None:
    def noise(indices: list[int], epoch: int = 0, seed: int = 0) -> list[float]:
        return (
            DatasetBatches(Noisy(), torch.float64, seed=seed)
            .batch(np.array(indices), epoch)[0][:, 1]
            .tolist()
        )

    assert noise([2, 7]) == noise([2]) + noise([7])
    assert len({*noise([1, 2]), *noise([1], epoch=1), *noise([1], seed=1)}) == 4


def test_random_transforms_leave_the_global_generators_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()  # noqa: NPY002

    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    DatasetBatches(Noisy()).batch(np.arange(10))
    assert draw() == expected


def test_dataset_items_must_be_pairs() -> None:
    with pytest.raises(UserError, match=r"sample 1 of list is a int; needed is a pair"):
        DatasetBatches([(torch.zeros(1), 0), 7]).batch(np.arange(2))


# --- augmentation ---


def test_augmentation_shifts_and_mirrors_by_what_it_says() -> None:
    """Each result is one of the windows of the padded image, mirrored or not, and all of them occur."""
    rng = np.random.default_rng(0)
    image = rng.integers(1, 256, (2, 5, 6), dtype=np.uint8)
    count = 2000
    images = np.broadcast_to(image, (count, *image.shape)).copy()
    padded = np.pad(image, ((0, 0), (2, 2), (2, 2)))
    windows = {
        np.ascontiguousarray(padded[:, y : y + 5, x : x + 6][..., ::step]).tobytes(): (y, x, step)
        for y in range(5)
        for x in range(5)
        for step in (1, -1)
    }
    assert len(windows) == 50
    result = Augment(pad=2, flip=True, seed=7).apply(images, np.arange(count), epoch=3)
    assert (result.dtype, result.shape) == (np.uint8, images.shape)
    seen = [windows[one.tobytes()] for one in result]
    frequencies = np.unique(np.array(seen), axis=0, return_counts=True)[1]
    assert len(frequencies) == 50
    assert frequencies.min() > count / 50 / 2.5
    assert frequencies.max() < count / 50 * 2
    np.testing.assert_array_equal(images[-1], image)


def test_augmentation_of_a_sample_depends_on_seed_and_epoch_not_on_the_batch() -> None:
    images = digits().train.images[:100]
    numbers = np.arange(100) + 40
    augment = Augment(pad=2, flip=True)
    whole = augment.apply(images, numbers, 0)
    np.testing.assert_array_equal(augment.apply(images[30:35], numbers[30:35], 0), whole[30:35])
    np.testing.assert_array_equal(augment.apply(images[::-1], numbers[::-1], 0), whole[::-1])
    for other in (augment.apply(images, numbers, 1), Augment(2, True, seed=1).apply(images, numbers, 0)):
        assert (other != whole).any(axis=(1, 2, 3)).mean() > 0.8


def test_augmentation_is_pinned() -> None:
    """Another choice changes every training trajectory with augmentation."""
    images = np.arange(1, 10, dtype=np.uint8).reshape(1, 1, 3, 3).repeat(2, axis=0)
    result = Augment(pad=1, flip=True, seed=0).apply(images, np.array([3, 2]), epoch=1)
    assert result[0, 0].tolist() == [[0, 4, 5], [0, 7, 8], [0, 0, 0]]
    assert result[1, 0].tolist() == [[2, 1, 0], [5, 4, 0], [8, 7, 0]]


def test_augmentation_may_do_nothing() -> None:
    images = digits().train.images[:4]
    np.testing.assert_array_equal(Augment().apply(images, np.arange(4), 0), images)
    assert Augment(2, True).apply(images[:0], np.arange(0), 0).shape == (0, 1, 8, 8)


def test_batches_are_augmented_by_sample_and_epoch() -> None:
    train = digits().train
    indices = np.array([900, 3])
    augment = Augment(pad=1, flip=True)
    x_BCHW, y_B = Batches(train, torch.float64, augment=augment).batch(indices, epoch=2)  # noqa: N806
    pixels = augment.apply(train.images[indices], indices, 2)
    np.testing.assert_allclose(x_BCHW.numpy(), (pixels / 16 - train.mean[0]) / train.std[0], atol=1e-14)
    assert y_B.tolist() == train.labels[indices].tolist()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"pad": -1}, r"data\.augment\.pad is -1"),
        ({"pad": 1.5}, r"data\.augment\.pad is 1\.5"),
        ({"flip": 1}, r"data\.augment\.flip is 1"),
        ({"crop": 4}, r"data\.augment is .*pad \(pixels\) and flip"),
        (True, r"data\.augment is True"),
    ],
)
def test_augmentation_refuses_what_it_does_not_know(node: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Augment.from_config(node, seed=0)  # type: ignore[arg-type]


def test_augmentation_from_a_configuration() -> None:
    assert Augment.from_config(None, seed=3) is None
    assert Augment.from_config({"pad": 4, "flip": True}, seed=3) == Augment(4, True, 3)
    with pytest.raises(UserError, match=r"data\.augment: works on hydssp\.data\.ArrayDataset only"):
        make_batches(Noisy(), augment=Augment())


# --- synthetic ---


def test_synthetic_is_decided_by_its_seed() -> None:
    one, same, other = (synthetic((2, 5, 7), 3, 30, 12, seed=seed) for seed in (4, 4, 5))
    assert (len(one.train), len(one.test), one.train.shape) == (30, 12, (2, 5, 7))
    np.testing.assert_array_equal(one.train.images, same.train.images)
    np.testing.assert_array_equal(one.test.images, same.test.images)
    assert not np.array_equal(one.train.images, other.train.images)
    assert np.bincount(one.train.labels).tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    ("separation", "least", "most"), [(8.0, 0.98, 1.0), (2.0, 0.4, 0.9), (0.0, 0.2, 0.3)]
)
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 32, 32)])
def test_synthetic_is_as_hard_as_it_says_whatever_the_shape(shape, separation, least, most) -> None:
    splits = synthetic(shape, 4, 4000, 1000, separation=separation)
    train = splits.train.images.reshape(4000, -1).astype(np.float32)
    centres = np.stack([train[splits.train.labels == k].mean(axis=0) for k in range(4)])
    test = splits.test.images.reshape(1000, -1).astype(np.float32)
    nearest = (-2 * test @ centres.T + (centres**2).sum(axis=1)).argmin(axis=1)
    assert least <= (nearest == splits.test.labels).mean() <= most


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [3, 32]}, r"data\.shape is \[3, 32\]"),
        ({"shape": [3, 0, 1]}, r"data\.shape"),
        ({"shape": 8}, r"data\.shape is 8"),
        ({"num_classes": 0}, r"data\.num_classes is 0"),
        ({"num_samples": 1.5}, r"data\.num_samples is 1\.5"),
        ({"num_test": True}, r"data\.num_test is True"),
        ({"seed": -1}, r"data\.seed is -1"),
        ({"separation": -1}, r"data\.separation is -1"),
    ],
)
def test_synthetic_refuses_bad_arguments(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        synthetic(**changes)


# --- digits ---


def test_digits_shapes_and_normalisation() -> None:
    splits = digits()
    assert (len(splits.train), len(splits.test)) == (1437, 360)
    assert splits.train.shape == (1, 8, 8)
    assert splits.train.num_classes == 10
    assert splits.train.images.max() == 16
    pixels = splits.train.images / 16
    assert splits.train.mean[0] == pytest.approx(pixels.mean(), abs=5e-5)
    assert splits.train.std[0] == pytest.approx(pixels.std(), abs=5e-5)
    assert (np.bincount(splits.test.labels, minlength=10) >= 25).all()


def test_digits_division_never_changes() -> None:
    splits = digits()
    content = splits.train.images.tobytes() + splits.test.images.tobytes()
    content += splits.train.labels.astype("<i8").tobytes() + splits.test.labels.astype("<i8").tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == "ae03b681a9953686"


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    theirs = datasets.load_digits()
    with np.load(Path(fashion.__file__).with_name("digits.npz")) as ours:
        np.testing.assert_array_equal(ours["images"], theirs.images)
        np.testing.assert_array_equal(ours["labels"], theirs.target)


def test_digits_licence_lies_beside_the_data() -> None:
    text = Path(fashion.__file__).with_name("digits.LICENSE.txt").read_text()
    assert "CC BY 4.0" in text
    assert "Alpaydin" in text


# --- IDX reader ---


@pytest.mark.parametrize("gzipped", [True, False])
@pytest.mark.parametrize("shape", [(7,), (3, 300, 2)])
def test_idx_reads_what_was_written(tmp_path: Path, gzipped: bool, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    content = idx_bytes(array)
    path = tmp_path / "file"  # neither name ends in .gz: content decides
    path.write_bytes(gzip.compress(content) if gzipped else content)
    np.testing.assert_array_equal(read_idx(path), array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (b"<html>not found", "not an IDX file"),
        (bytes([0, 0, 0x0D, 1, 0, 0, 0, 0]), "type 0x0d"),
        (bytes([0, 0, 8, 3, 0, 0]), "ends within its header"),
        (idx_bytes(np.zeros((2, 3)))[:-1], r"holds 5 elements, but its header says \[2, 3\]"),
        (idx_bytes(np.zeros((2, 3))) + b"x", "holds 7 elements"),
        (gzip.compress(idx_bytes(np.zeros((2, 300))))[:-9], "cannot be read"),
        (gzip.compress(idx_bytes(np.zeros(9)))[:-8] + bytes(8), "cannot be read"),
    ],
)
def test_idx_refuses_damaged_files_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train-images"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_idx(path)
    assert str(path) in str(error.value)
    assert "data.root" in str(error.value)


def test_idx_checksum_is_of_the_uncompressed_content(tmp_path: Path) -> None:
    content = idx_bytes(np.arange(5))
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(content))
    prefix = hashlib.sha256(content).hexdigest()[:16]
    assert read_idx(path, prefix).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match=f"SHA-256 {prefix}.* instead of 0000000000000000"):
        read_idx(path, "0" * 16)


# --- Fashion-MNIST ---


@pytest.mark.parametrize("gzipped", [True, False])
def test_fashion_mnist_from_a_folder(tmp_path: Path, no_debian: Path, gzipped: bool) -> None:
    arrays = write_miniature(tmp_path / "mini", gzipped=gzipped)
    splits = fashion_mnist(root=str(tmp_path / "mini"), verify=False)
    np.testing.assert_array_equal(splits.train.images[:, 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(splits.train.labels, arrays["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(splits.test.images[:, 0], arrays["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(splits.test.labels, arrays["t10k-labels-idx1-ubyte"])
    assert splits.train.shape == (1, 28, 28)
    assert (splits.train.mean, splits.train.std) == ((0.2860,), (0.3530,))


def test_fashion_mnist_from_the_folder_that_torchvision_leaves(tmp_path: Path, no_debian: Path) -> None:
    write_miniature(tmp_path / "FashionMNIST" / "raw", num_train=11)
    assert len(fashion_mnist(root=tmp_path, verify=False).train) == 11


def test_fashion_mnist_limit_takes_the_first_training_images(tmp_path: Path, no_debian: Path) -> None:
    arrays = write_miniature(tmp_path)
    splits = fashion_mnist(root=tmp_path, limit=7, verify=False)
    np.testing.assert_array_equal(splits.train.images[:, 0], arrays["train-images-idx3-ubyte"][:7])
    assert (len(splits.train), len(splits.test)) == (7, 10)
    assert len(fashion_mnist(root=tmp_path, limit=20, verify=False).train) == 20


@pytest.mark.parametrize("limit", [0, -1, 21, 2.5, True, "7"])
def test_fashion_mnist_refuses_a_limit_out_of_range(tmp_path: Path, no_debian: Path, limit: object) -> None:
    write_miniature(tmp_path)
    with pytest.raises(UserError, match=r"data\.limit is .*allowed is 1 to 20"):
        fashion_mnist(root=tmp_path, limit=limit, verify=False)  # type: ignore[arg-type]


def test_fashion_mnist_root_is_never_replaced_by_other_data(tmp_path: Path, no_debian: Path) -> None:
    write_miniature(no_debian, num_train=12)
    write_miniature(tmp_path / "own", num_train=13)
    assert len(fashion_mnist(verify=False).train) == 12
    assert len(fashion_mnist(root=tmp_path / "own", verify=False).train) == 13
    (tmp_path / "own" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match="missing t10k-labels-idx1-ubyte"):
        fashion_mnist(root=tmp_path / "own", verify=False)


def test_fashion_mnist_absent_says_all_there_is_to_know(tmp_path: Path, no_debian: Path) -> None:
    write_miniature(tmp_path / "own")
    (tmp_path / "own" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError) as error:
        fashion_mnist(root=tmp_path / "own")
    own, raw = str(error.value).splitlines()[1:3]
    assert str(tmp_path / "own") in own
    assert own.endswith("missing t10k-labels-idx1-ubyte")
    assert str(tmp_path / "own" / "FashionMNIST" / "raw") in raw
    for hint in (
        "Fashion-MNIST",
        "data.root=",
        "apt-get install dataset-fashion-mnist",
        "Nothing is downloaded",
    ):
        assert hint in str(error.value)


def test_fashion_mnist_absent_without_root(no_debian: Path) -> None:
    with pytest.raises(UserError, match=r"data\.root is not set"):
        fashion_mnist()


def test_fashion_mnist_verifies_by_default(tmp_path: Path, no_debian: Path) -> None:
    write_miniature(tmp_path)
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz has SHA-256 .*data\.verify=false"):
        fashion_mnist(root=tmp_path)


def test_fashion_mnist_refuses_files_that_do_not_belong_together(tmp_path: Path, no_debian: Path) -> None:
    write_miniature(tmp_path, num_train=20, gzipped=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(19)))
    with pytest.raises(UserError, match="20 images, train-labels-idx1-ubyte 19 labels"):
        fashion_mnist(root=tmp_path, verify=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros((20, 1))))
    with pytest.raises(UserError, match="2 dimensions instead of 1"):
        fashion_mnist(root=tmp_path, verify=False)


@pytest.mark.skipif(
    not fashion.DEBIAN_FOLDER.is_dir(),
    reason="Fashion-MNIST is absent: apt-get install dataset-fashion-mnist",
)
def test_fashion_mnist_real_files() -> None:
    splits = fashion_mnist()
    assert (len(splits.train), len(splits.test)) == (60_000, 10_000)
    assert np.bincount(splits.train.labels).tolist() == [6_000] * 10
    assert np.bincount(splits.test.labels).tolist() == [1_000] * 10
    # Whole numbers keep this from making a float64 copy of 47 million pixels.
    count = splits.train.images.size
    histogram = np.bincount(splits.train.images.reshape(-1), minlength=256)
    levels = np.arange(256) / 255
    mean = (histogram * levels).sum() / count
    assert mean == pytest.approx(splits.train.mean[0], abs=5e-5)
    std = np.sqrt((histogram * (levels - mean) ** 2).sum() / count)
    assert std == pytest.approx(splits.train.std[0], abs=5e-5)


# --- order of an epoch ---


def test_order_is_a_permutation_that_changes_with_epoch_and_seed() -> None:
    order = EpochOrder(100, seed=5)
    first, second = order.indices(0, 0, 100), order.indices(1, 0, 100)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first.dtype == np.int64
    assert first.tolist() != second.tolist()
    assert first.tolist() != EpochOrder(100, seed=6).indices(0, 0, 100).tolist()
    assert first.tolist() != list(range(100))


def test_order_is_the_same_on_every_rank_whatever_was_asked_before() -> None:
    one, other = EpochOrder(50, seed=1), EpochOrder(50, seed=1)
    whole = {epoch: one.indices(epoch, 0, 50).tolist() for epoch in range(5)}
    for epoch in (4, 0, 3, 3, 1, 2, 0):
        assert other.indices(epoch, 10, 7).tolist() == whole[epoch][10:17]


def test_order_is_pinned() -> None:
    """Another order changes every training trajectory: it must be a decision, not an accident."""
    assert EpochOrder(10, seed=0).indices(0, 0, 10).tolist() == [4, 9, 8, 7, 5, 3, 0, 1, 2, 6]
    assert EpochOrder(10, seed=0).indices(1, 0, 10).tolist() == [3, 8, 9, 4, 6, 7, 2, 0, 1, 5]


def test_order_leaves_the_global_generator_alone() -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    EpochOrder(10, seed=0).indices(0, 0, 10)
    digits()
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_order_computes_neighbouring_epochs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda *a: calls.append(1) or real(*a))
    order = EpochOrder(10, seed=0)
    for epoch in (3, 4, 3, 4, 3, 4, 5, 4, 5):
        order.indices(epoch, 0, 10)
    assert len(calls) == 3


def test_order_without_shuffling() -> None:
    order = EpochOrder(10, seed=0, shuffle=False)
    assert order.indices(0, 2, 3).tolist() == [2, 3, 4]
    assert order.indices(9, 2, 3).tolist() == [2, 3, 4]


def test_order_cannot_be_spoilt_by_a_caller() -> None:
    with pytest.raises(ValueError, match="read-only"):
        EpochOrder(10, seed=0).indices(0, 0, 10)[0] = 1


@pytest.mark.parametrize(("epoch", "start", "count"), [(0, 8, 3), (0, -1, 2), (0, 0, -1), (-1, 0, 1)])
def test_order_refuses_positions_outside_the_epoch(epoch: int, start: int, count: int) -> None:
    with pytest.raises(IndexError, match="10 samples"):
        EpochOrder(10, seed=0).indices(epoch, start, count)


def test_order_refuses_bad_sizes_and_seeds() -> None:
    with pytest.raises(UserError, match="at least 1"):
        EpochOrder(0, seed=0)
    with pytest.raises(UserError, match="seed is -1"):
        EpochOrder(10, seed=-1)


# --- layers ---


def test_data_needs_neither_torch_nor_mpi() -> None:
    code = "import sys, hydssp.data as d; d.digits(); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "hydssp.data.fashion" in loaded
    assert not loaded & {"torch", "torchvision", "mpi4py", "hydra"}


def test_shards_keep_their_samples_and_change_their_order() -> None:
    order = EpochOrder(11, seed=3, num_shards=2)
    epochs = [[order.indices(epoch, 0, 5), order.indices(epoch, 5, 6)] for epoch in range(3)]
    for first, second in epochs:
        assert sorted(first) == sorted(epochs[0][0])
        assert sorted(second) == sorted(epochs[0][1])
        assert sorted([*first, *second]) == list(range(11))
    assert any((epochs[0][1] != second).any() for _, second in epochs[1:])
    assert sorted(epochs[0][0]) != list(range(5))  # not the file's first ones
