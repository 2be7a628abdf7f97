"""Fashion-MNIST from files already on the machine: where to look, and what to say when they are missing.

Downloads nothing: compute nodes usually have no internet. Xiao, Rasul, Vollgraf: Fashion-MNIST, arXiv
1708.07747 (MIT licence).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hydssp.data.arrays import ArrayDataset, Splits
from hydssp.data.idx import read_idx
from hydssp.errors import UserError

DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
NUM_CLASSES = 10
# Of pixel / 255 on the 60,000 training images.
MEAN = (0.2860,)
STD = (0.3530,)


class _File(NamedTuple):
    name: str
    sha256_prefix: str
    """Of the uncompressed content."""


TRAIN_IMAGES = _File("train-images-idx3-ubyte", "c59f468a2f672dc8")
TRAIN_LABELS = _File("train-labels-idx1-ubyte", "bad3541b69d91243")
TEST_IMAGES = _File("t10k-images-idx3-ubyte", "5b4141f0afbad91e")
TEST_LABELS = _File("t10k-labels-idx1-ubyte", "0402a96d92fd2663")
FILES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)


def fashion_mnist(root: str | Path | None = None, limit: int | None = None, verify: bool = True) -> Splits:
    """Fashion-MNIST: 60,000 training and 10,000 test images of shape (1, 28, 28) in 10 classes.

    Args:
        root: Folder with the four IDX files, gzipped or plain, or the folder that torchvision was given. None:
            the folder of the Debian package.
        limit: Take only the first so many training images; None: all. The test images are never cut.
        verify: Compare the SHA-256 of the uncompressed files with the published data; costs some 10 ms.
            False takes any data of the same form: a cut-down copy, or MNIST or KMNIST under this name.

    Returns:
        The two parts; mean and std are those of all training images, whatever the limit.

    Raises:
        UserError: When no folder has all four files, when a file is damaged or not what it should be, or when
            ``limit`` is not between 1 and the number of training images.
    """
    folder = find(root)
    train = _read(folder, TRAIN_IMAGES, TRAIN_LABELS, verify)
    test = _read(folder, TEST_IMAGES, TEST_LABELS, verify)
    return Splits(train.head(limit), test)


def find(root: str | Path | None) -> Path:
    """The first folder that has all four files. One that was asked for is never replaced by another.

    Raises:
        UserError: When there is none.
    """
    places: list[tuple[str, Path]] = []
    if root is not None:
        folder = Path(str(root)).expanduser()
        places.append((f"data.root={root}", folder))
        places.append((f"data.root={root}, as torchvision leaves it", folder / "FashionMNIST" / "raw"))
    else:
        places.append((f"data.root is not set; Debian package {DEBIAN_PACKAGE}", DEBIAN_FOLDER))

    looked: list[str] = []
    for origin, folder in places:
        missing = [file.name for file in FILES if _path(folder, file) is None]
        if not missing:
            return folder
        fault = f"missing {', '.join(missing)}" if folder.is_dir() else "no such folder"
        looked.append(f"  {folder} ({origin}): {fault}")
    raise UserError(
        "data: Fashion-MNIST was not found. Looked in:\n"
        + "\n".join(looked)
        + "\nSet data.root=FOLDER to a folder with "
        + ", ".join(file.name for file in FILES)
        + f" (plain or with .gz), or leave it null and run: apt-get install {DEBIAN_PACKAGE}. Nothing is downloaded"
        " during a run; compute nodes usually have no internet, so the files must be in place before the job starts."
    )


def paths(folder: Path) -> list[Path]:
    """The four files in a folder that ``find`` has found."""
    return [path for file in FILES if (path := _path(folder, file)) is not None]


def _path(folder: Path, file: _File) -> Path | None:
    for name in (file.name, f"{file.name}.gz"):
        if (folder / name).is_file():
            return folder / name
    return None


def _read(folder: Path, images_file: _File, labels_file: _File, verify: bool) -> ArrayDataset:
    arrays = []
    for file, num_dimensions in ((images_file, 3), (labels_file, 1)):
        path = _path(folder, file)
        assert path is not None, "the folder was searched before"
        array = read_idx(path, file.sha256_prefix if verify else "")
        if array.ndim != num_dimensions:
            raise UserError(
                f"data: the file {path} has {array.ndim} dimensions instead of {num_dimensions}; set"
                " data.root to a folder with the right files"
            )
        arrays.append(array)
    images, labels = arrays
    if len(images) != len(labels):
        raise UserError(
            f"data: {images_file.name} has {len(images)} images, {labels_file.name} {len(labels)} labels in"
            f" {folder}; set data.root to a folder with files that belong together"
        )
    return ArrayDataset(images[:, np.newaxis], labels.astype(np.int64), MEAN, STD, NUM_CLASSES)
