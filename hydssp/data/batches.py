"""Bytes to tensors: the one place where a batch of images becomes what the model eats.

Imports torch; reads no file and decides no order (``hydssp.data.order`` does). No MPI, no Hydra.

Shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import numpy as np
import torch

from hydssp.data.arrays import ArrayDataset


class Batches:
    """Normalised batches of one data set in one dtype on one device.

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
    ) -> None:
        """Prepare the constants.

        Args:
            dataset: The images and labels; kept by reference.
            dtype: Floating-point type of the images; the normalisation is computed in it.
            device: Where the tensors go.
        """
        self.dataset = dataset
        self.dtype = dtype
        self.device = torch.device(device)
        channels = dataset.shape[0]
        self._mean_C11 = torch.tensor(dataset.mean, dtype=dtype, device=self.device).view(channels, 1, 1)
        self._std_C11 = torch.tensor(dataset.std, dtype=dtype, device=self.device).view(channels, 1, 1)

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels at ``indices``, in that order.

        Args:
            indices: Integers [B], each in 0 .. len(dataset)-1; B may be 0.

        Returns:
            ``x_BCHW`` of the chosen dtype, ``(pixel / max_value - mean) / std``, and ``y_B`` int64; both are
            copies.

        Raises:
            IndexError: When an index is too large.
        """
        # np.take copies always, so that the data set may be a read-only memory map; the bytes travel to the
        # device before they are widened, which is a quarter of the traffic.
        x_BCHW = torch.from_numpy(np.take(self.dataset.images, indices, axis=0)).to(self.device)  # noqa: N806
        x_BCHW = x_BCHW.to(self.dtype).div_(self.dataset.max_value)  # noqa: N806
        x_BCHW.sub_(self._mean_C11).div_(self._std_C11)
        y_B = torch.from_numpy(np.take(self.dataset.labels, indices)).to(self.device)  # noqa: N806
        return x_BCHW, y_B
