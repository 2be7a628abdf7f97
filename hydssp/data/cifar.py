"""CIFAR-10 and CIFAR-100 from the folders that their archives unpack to.

Finds, checks and reads the pickled files, without trusting them; downloads nothing: compute nodes usually have no
internet. Krizhevsky: Learning multiple layers of features from tiny images, 2009. numpy only.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hydssp.data.array_cache import ArrayCache, Facts
from hydssp.data.arrays import ArrayDataset, Splits
from hydssp.errors import UserError

SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Spec:
    """What one of the two data sets looks like on disk."""

    name: str
    title: str
    folder: str
    train: Mapping[str, str]
    """File to published MD5, in order."""
    test: Mapping[str, str]
    labels_key: str
    num_classes: int
    mean: tuple[float, float, float]
    """Of pixel / 255 on the training images."""
    std: tuple[float, float, float]
    archive: str
    archive_bytes: int
    archive_md5: str

    @property
    def files(self) -> dict[str, str]:
        """All files with their published MD5."""
        return {**self.train, **self.test}


CIFAR10 = Spec(
    name="cifar10",
    title="CIFAR-10",
    folder="cifar-10-batches-py",
    train={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    labels_key="labels",
    num_classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    archive="cifar-10-python.tar.gz",
    archive_bytes=170_498_071,
    archive_md5="c58f30108f718f92721af3b95e74349a",
)
CIFAR100 = Spec(
    name="cifar100",
    title="CIFAR-100",
    folder="cifar-100-python",
    train={"train": "16019d7e3df5f24257cddd939b257f8d"},
    test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    labels_key="fine_labels",
    num_classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    archive="cifar-100-python.tar.gz",
    archive_bytes=169_001_437,
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
)


@dataclass(frozen=True)
class Loaded:
    """A data set, and what was found where."""

    splits: Splits
    folder: Path
    md5: dict[str, str]
    """Of the files as they were read."""
    cache: Path | None
    """The folder that the arrays are mapped from; None: they are in memory."""


def cifar10(
    root: str | Path | None = None,
    limit: int | None = None,
    verify: bool = False,
    cache: str | Path | None = None,
) -> Splits:
    """CIFAR-10: 50,000 training and 10,000 test images of shape (3, 32, 32) in 10 classes.

    The first process of a node that asks converts the files to arrays on disk (184 MB); all map them.

    Args:
        root: Folder with ``cifar-10-batches-py``, or that folder itself.
        limit: Take only the first so many training images; None: all.
        verify: Compare the MD5 of the files with the published ones. False takes any data of the same form.
        cache: Folder for the arrays; None: ``hydssp-cache`` beside the files, or, where that cannot be written to, a
            private folder in ``$TMPDIR``.

    Returns:
        The two parts; mean and std are those of all training images, whatever the limit.

    Raises:
        UserError: When the files are absent, damaged or not what they should be, when the arrays can be written
            nowhere, or when ``limit`` is not between 1 and the number of training images.
    """
    return load(CIFAR10, root, limit, verify, cache).splits


def cifar100(
    root: str | Path | None = None,
    limit: int | None = None,
    verify: bool = False,
    cache: str | Path | None = None,
) -> Splits:
    """CIFAR-100: 50,000 training and 10,000 test images of shape (3, 32, 32) in 100 classes (the fine labels).

    As ``cifar10``, with the folder ``cifar-100-python``.
    """
    return load(CIFAR100, root, limit, verify, cache).splits


def load(
    spec: Spec,
    root: str | Path | None,
    limit: int | None = None,
    verify: bool = False,
    cache: str | Path | None = None,
    may_write: bool = True,
) -> Loaded:
    """Find, read and check; see ``cifar10``.

    Args:
        spec: Which data set.
        root: As there.
        limit: As there.
        verify: As there.
        cache: As there.
        may_write: False: arrays that are not in the cache are read into memory instead.

    Raises:
        UserError: As there.
    """
    folder = _find(spec, root)

    def make() -> tuple[dict[str, np.ndarray], Facts]:
        return _read(spec, folder)

    entry = ArrayCache(spec.name, folder, [*spec.files], cache)
    content = entry.fetch(make) if may_write else entry.find()
    # The sums are those of the files that the arrays were made from, so that nobody has to read the files again.
    arrays, facts = (content.arrays, content.facts) if content is not None else make()
    md5 = facts["md5"]
    different = [file for file, sum_ in spec.files.items() if md5[file] != sum_]
    if verify and different:
        raise UserError(
            f"data: {', '.join(f'{file} has MD5 {md5[file]} instead of {spec.files[file]}' for file in different)} in"
            f" {folder}; unpack {spec.archive} again, or set data.verify=false to take the files as they are"
        )

    def part(name: str) -> ArrayDataset:
        images, labels = arrays[f"{name}_images"], arrays[f"{name}_labels"]
        return ArrayDataset(images, labels, spec.mean, spec.std, spec.num_classes)

    splits = Splits(part("train").head(limit), part("test"))
    return Loaded(splits, folder, md5, content.folder if content is not None else None)


def _find(spec: Spec, root: str | Path | None) -> Path:
    """The folder with all files, at ``root`` or just below."""
    looked = []
    if root is None:
        looked.append("  nowhere: data.root is not set")
    else:
        given = Path(str(root)).expanduser()
        for folder in (given / spec.folder, given):
            missing = [file for file in spec.files if not (folder / file).is_file()]
            if not missing:
                return folder
            fault = f"missing {', '.join(missing)}" if folder.is_dir() else "no such folder"
            looked.append(f"  {folder.absolute()} (data.root={root}): {fault}")
    raise UserError(
        f"data: {spec.title} was not found. Looked in:\n"
        + "\n".join(looked)
        + f"\nSet data.root=FOLDER to the folder that has {spec.folder} in it, as torchvision leaves it, with the files"
        f" {', '.join(spec.files)}. They come from {spec.archive} ({spec.archive_bytes:,} bytes, MD5"
        f" {spec.archive_md5}); unpack it with: tar -xzf {spec.archive} -C FOLDER. Nothing is downloaded during a run;"
        " compute nodes usually have no internet, so the files must be in place before the job starts. Try them with:"
        f" python -m hydssp.data check {spec.name} root=FOLDER"
    )


def _read(spec: Spec, folder: Path) -> tuple[dict[str, np.ndarray], Facts]:
    """All arrays in memory, and the MD5 of each file."""
    arrays: dict[str, np.ndarray] = {}
    sums: dict[str, str] = {}
    for part, files in (("train", spec.train), ("test", spec.test)):
        images, labels = [], []
        for file in files:
            path = folder / file
            try:
                content = path.read_bytes()
            except OSError as error:
                raise _unusable(path, f"cannot be read: {error}") from error
            sums[file] = hashlib.md5(content, usedforsecurity=False).hexdigest()
            some_images, some_labels = _parse(spec, path, content)
            images.append(some_images)
            labels.append(some_labels)
        arrays[f"{part}_images"] = np.concatenate(images)
        arrays[f"{part}_labels"] = np.concatenate(labels)
    return arrays, {"source": str(folder.absolute()), "md5": sums}


def _parse(spec: Spec, path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except _ForeignGlobalError as error:
        raise _unusable(path, f"{error}, which a file of {spec.title} does not; it was not run") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise _unusable(path, f"is no pickle of {spec.title} ({type(error).__name__}: {error})") from error
    data = batch.get("data") if isinstance(batch, dict) else None
    labels = batch.get(spec.labels_key) if isinstance(batch, dict) else None
    size = int(np.prod(SHAPE))
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != size:
        raise _unusable(path, f"has no 'data' of bytes [N, {size}]")
    if (
        not isinstance(labels, list)
        or len(labels) != len(data)
        or not all(type(label) is int and 0 <= label < spec.num_classes for label in labels)
    ):
        raise _unusable(
            path,
            f"has no list {spec.labels_key!r} with a number of 0 to {spec.num_classes - 1} for each image",
        )
    return data.reshape(len(data), *SHAPE), np.array(labels, np.int64)


def _unusable(path: Path, what: str) -> UserError:
    return UserError(
        f"data: the file {path} {what}. Replace the file, or set data.root to a folder with a good copy"
    )


class _ForeignGlobalError(pickle.UnpicklingError):
    pass


def _dtype(code: str, align: Any = False, copy: Any = False) -> np.dtype:
    """``numpy.dtype`` as pickles call it; old ones say 0 and 1, which numpy 2.4 deprecates."""
    return np.dtype(code, align=bool(align), copy=bool(copy))


# Taken from an array itself: where the function lives differs between numpy 1 and 2.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): codecs.encode,
}


class _Unpickler(pickle.Unpickler):
    """Builds arrays and plain Python objects, and refuses everything else that a pickle could run."""

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle asks for by name, if it is one of the few things that arrays need."""
        if (module, name) not in _ALLOWED:
            raise _ForeignGlobalError(f"asks for {module}.{name}")
        return _ALLOWED[module, name]
