"""From sample numbers to the arrays of a batch: the part of making a batch that a loader process can do.

Reads the data set and augments; decides no order, and moves nothing to a device. What comes out depends on seed,
epoch and sample numbers alone, never on the process. numpy only at import, so that a loader process for arrays stays
small; torch is imported for a data set of the user's, which needs it anyway. No MPI, no Hydra.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hydssp.data.arrays import ArrayDataset
from hydssp.data.augment import Augment
from hydssp.errors import TrainingError, UserError

if TYPE_CHECKING:
    import torch


class Samples(Protocol):
    """Where the arrays of a batch come from; can be pickled."""

    def gather(self, indices: np.ndarray, epoch: int) -> tuple[Any, Any]:
        """Inputs and targets of the samples ``indices``, first dimension the batch: arrays or CPU tensors.

        They belong to the caller.
        """


class ArraySamples:
    """Images of an ``ArrayDataset`` as bytes [B, C, H, W], augmented where asked, and labels [B]."""

    def __init__(self, dataset: ArrayDataset, augment: Augment | None = None) -> None:
        self.dataset = dataset
        self.augment = augment

    def gather(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """See ``Samples.gather``.

        Raises:
            IndexError: When an index is too large.
        """
        # np.take copies always, so that the data set may be a read-only memory map.
        images = np.take(self.dataset.images, indices, axis=0)
        if self.augment is not None:
            images = self.augment.apply(images, indices, epoch)
        return images, np.take(self.dataset.labels, indices)


class DatasetSamples:
    """Samples of any map-style data set, collated as ``torch.utils.data.DataLoader`` does.

    Random transforms that draw from the generators of ``random``, ``numpy.random`` or torch are seeded for each
    sample, and the generators put back afterwards.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        """Keep the data set by reference.

        Args:
            dataset: Its items are pairs: a tensor and a number (or tensor).
            seed: Of random transforms.
        """
        self.dataset = dataset
        self._seed = seed

    def gather(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Samples.gather``.

        Raises:
            UserError: When an item is not a pair.
            TrainingError: When an item cannot be read, or the items not joined; it says which.
        """
        from torch.utils.data import default_collate

        items = []
        with _global_generators_put_back():
            for index in indices.tolist():
                _seed_global_generators(self._seed, epoch, index)
                items.append(item_of(self.dataset, index))
        try:
            inputs, targets = default_collate(items)
        except Exception as error:
            shown = ", ".join(map(str, indices[:8])) + (
                f" and {len(indices) - 8} more" if len(indices) > 8 else ""
            )
            raise TrainingError(
                f"data: samples {shown} of {type(self.dataset).__name__} cannot be joined to a batch: "
                f"{type(error).__name__}: {error}"
            ) from None
        return inputs, targets


def item_of(dataset: Any, index: int) -> tuple[Any, Any]:
    """One item of a map-style data set of the user's.

    Raises:
        UserError: When it is not a pair.
        TrainingError: When the data set raises; its exception is the cause, with a traceback that begins there.
    """
    try:
        item = dataset[index]
    except UserError:
        raise
    except Exception as error:
        its_own = error.__traceback__.tb_next if error.__traceback__ else None
        raise TrainingError(
            f"data: reading sample {index} of {type(dataset).__name__} failed with {type(error).__name__}: {error}"
        ) from error.with_traceback(its_own)
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise UserError(
            f"data: sample {index} of {type(dataset).__name__} is a {type(item).__name__}; needed is a pair of input "
            "and target"
        )
    first, second = item
    return first, second


@contextlib.contextmanager
def _global_generators_put_back() -> Iterator[None]:
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def _seed_global_generators(seed: int, epoch: int, index: int) -> None:
    import torch

    state = np.random.SeedSequence(seed, spawn_key=(epoch, index)).generate_state(4)
    number = int(state[0]) | int(state[1]) << 32
    random.seed(number)
    np.random.seed(state)  # noqa: NPY002
    # Not torch.manual_seed, which would reset the generators of the GPUs too.
    torch.default_generator.manual_seed(number)
