"""The element formats in which vectors travel between server and workers.

One job: turn a stretch of a vector into the format of the wire and back. Numpy knows no bfloat16, so that transports
carry it as uint16 and torch looks at the same bytes; fp32 stands for the vectors as they are, whatever their dtype.
Rounds to nearest, ties to even. Knows no transport and keeps no state.
"""

from __future__ import annotations

import numpy as np
import torch

_SHORT = {"bf16": (torch.bfloat16, np.uint16), "fp16": (torch.float16, np.float16)}


class Wire:
    """One format.

    Args:
        name: ``fp32``, ``bf16`` or ``fp16``.
        dtype: Of the vectors; with ``fp32`` also of what travels.

    Attributes:
        is_plain: What travels are the vectors' own bytes.
        dtype: Torch's element type of what travels.
        numpy_dtype: The same for a transport: uint16 for bfloat16.
    """

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.is_plain = name not in _SHORT
        plain = (dtype, {torch.float32: np.float32, torch.float64: np.float64}[dtype])
        self.dtype, numpy_dtype = _SHORT.get(name, plain)
        self.numpy_dtype: np.dtype = np.dtype(numpy_dtype)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """The memory of ``array``, 1-D of ``numpy_dtype``, as a tensor of ``dtype``."""
        if self.dtype is torch.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        """Inverse of ``tensor``, for one on the CPU."""
        if self.dtype is torch.bfloat16:
            return tensor.detach().view(torch.int16).numpy().view(np.uint16)
        return tensor.detach().numpy()

    def encode(self, out: np.ndarray, values: np.ndarray) -> None:
        """Write ``values``, 1-D of the vectors' dtype, into ``out``, as long and of ``numpy_dtype``."""
        if self.is_plain:
            out[:] = values
        else:
            self.tensor(out).copy_(torch.from_numpy(values))
