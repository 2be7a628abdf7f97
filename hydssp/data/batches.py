"""Arrays to tensors: the one place where a batch becomes what the model eats, on its device.

Imports torch; reads no file and decides no order (``hydssp.data.order`` does). No MPI, no Hydra.

Shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from hydssp.data.arrays import ArrayDataset
from hydssp.data.augment import Augment
from hydssp.data.samples import ArraySamples, DatasetSamples, Samples
from hydssp.errors import UserError

Pair = tuple[torch.Tensor, torch.Tensor]


class BatchMaker(Protocol):
    """Makes batches in two steps, the first of which a loader process can do."""

    @property
    def samples(self) -> Samples:
        """The first step."""

    def finish(self, inputs: Any, targets: Any) -> Pair:
        """The second: what ``samples.gather`` gave, as tensors on the device; may take over its memory."""

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Pair:
        """Both."""


def make_batches(
    dataset: Any,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    augment: Augment | None = None,
    seed: int = 0,
) -> BatchMaker:
    """Batches of any data set that ``hydssp.data.check_splits`` accepts.

    Args:
        dataset: An ``ArrayDataset``, or a map-style data set whose items are pairs of input and target.
        dtype: Floating-point type of inputs (and of targets that are no class numbers).
        device: Where the tensors go.
        augment: For training images in an ``ArrayDataset``.
        seed: Of the random transforms that a data set of the user's may have.

    Raises:
        UserError: When ``augment`` is given for another kind of data set.
    """
    if isinstance(dataset, ArrayDataset):
        return Batches(dataset, dtype, device, augment)
    if augment is not None:
        raise UserError(
            f"data.augment: works on hydssp.data.ArrayDataset only, and this data set is a {type(dataset).__name__};"
            " set data.augment=null and do it in the data set's own __getitem__"
        )
    return DatasetBatches(dataset, dtype, device, seed)


class Batches:
    """Normalised batches of images in one dtype on one device.

    Example:
        >>> from hydssp.data import digits
        >>> x_BCHW, y_B = Batches(digits().train).batch(np.arange(32))
        >>> tuple(x_BCHW.shape), tuple(y_B.shape)
        ((32, 1, 8, 8), (32,))
    """

    def __init__(
        self,
        dataset: ArrayDataset,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        augment: Augment | None = None,
    ) -> None:
        """Prepare the constants.

        Args:
            dataset: The images and labels; kept by reference.
            dtype: Floating-point type of the images; the normalisation is computed in it.
            device: Where the tensors go.
            augment: Random shifts and mirroring; None: none.
        """
        self.samples = ArraySamples(dataset, augment)
        self.dtype = dtype
        self.device = torch.device(device)
        self._max_value = dataset.max_value
        channels = dataset.shape[0]
        self._mean_C11 = torch.tensor(dataset.mean, dtype=dtype, device=self.device).view(channels, 1, 1)
        self._std_C11 = torch.tensor(dataset.std, dtype=dtype, device=self.device).view(channels, 1, 1)

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Pair:
        """Images and labels at ``indices``, in that order.

        Args:
            indices: Integers [B], each in 0 .. len(dataset)-1; B may be 0.
            epoch: Decides the augmentation, nothing else.

        Returns:
            ``x_BCHW`` of the chosen dtype, ``(pixel / max_value - mean) / std``, and ``y_B`` int64; both are
            copies.

        Raises:
            IndexError: When an index is too large.
        """
        return self.finish(*self.samples.gather(indices, epoch))

    def finish(self, inputs: np.ndarray, targets: np.ndarray) -> Pair:
        """Normalise images [B, C, H, W] of bytes; see ``BatchMaker.finish``."""
        # The bytes travel to the device before they are widened, which is a quarter of the traffic.
        x_BCHW = to_device(inputs, self.device).to(self.dtype).div_(self._max_value)  # noqa: N806
        x_BCHW.sub_(self._mean_C11).div_(self._std_C11)
        return x_BCHW, to_device(targets, self.device)


class DatasetBatches:
    """Batches of a map-style data set of the user's."""

    def __init__(
        self,
        dataset: Any,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        """Keep the data set by reference.

        Args:
            dataset: ``dataset[index]`` is a pair: a tensor, and a class number or tensor.
            dtype: What floating-point inputs and targets are converted to; whole numbers stay as they are.
            device: Where the tensors go.
            seed: Of its random transforms.
        """
        self.samples = DatasetSamples(dataset, seed)
        self.dtype = dtype
        self.device = torch.device(device)

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Pair:
        """Inputs and targets at ``indices``, in that order, as ``torch.utils.data.default_collate`` makes them.

        Args:
            indices: Integers [B], B at least 1.
            epoch: Decides what random transforms draw.

        Raises:
            UserError: When an item is not a pair.
            TrainingError: When an item cannot be read, or the items not joined.
        """
        return self.finish(*self.samples.gather(indices, epoch))

    def finish(self, inputs: Any, targets: Any) -> Pair:
        """See ``BatchMaker.finish``."""
        moved = [to_device(tensor, self.device) for tensor in (inputs, targets)]
        first, second = (tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in moved)
        return first, second


def to_device(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same values on ``device``; on the CPU it shares the memory.

    To a GPU it goes through pinned memory and is not waited for: whatever uses it on the current stream comes after
    it, and torch keeps the pinned block from being used again before the copy is done.
    """
    tensor = torch.as_tensor(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
