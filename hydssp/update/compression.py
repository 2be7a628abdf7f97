"""Pushes that carry less than every element: top-k and stochastic quantisation, in a slot of fixed size.

One job: a vector into the words of a slot and back, piece by piece. Both lose a lot, so that a worker must keep what
was lost and add it to its next vector (error feedback; Stich et al. 2018, arXiv 1809.07599; Karimireddy et al. 2019,
arXiv 1901.09847). Knows no transport and keeps no state: what is drawn follows from a seed, the worker and the
iteration. Words are int32.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from hydssp.update.wire import BLOCK, Wire


class _Words(Wire):
    """What slots of int32 words have in common."""

    def __init__(self, num_words: int) -> None:
        self.is_plain = False
        self.dtype = torch.int32
        self.numpy_dtype = np.dtype(np.int32)
        self.num_words = num_words

    def size(self, numel: int) -> int:
        """Words of a slot."""
        return self.num_words


class TopK(_Words):
    """The k elements of largest magnitude, as they are; the others are taken for 0.

    Args:
        numel: Elements of the vector, below 2**31.
        ratio: k / numel, above 0 and at most 1; k is at least 1.
    """

    def __init__(self, numel: int, ratio: float) -> None:
        self.count = max(1, math.floor(ratio * numel))
        super().__init__(2 * self.count)

    def pack(self, vector: torch.Tensor, out: torch.Tensor, draw: tuple[int, int]) -> None:
        """See ``Wire``; draws nothing. Among equal magnitudes torch chooses."""
        places = torch.topk(vector.abs(), self.count, sorted=False).indices.sort().values
        out[: self.count] = places
        out[self.count :].view(torch.float32).copy_(vector[places])

    def unpack(self, travelled: torch.Tensor, start: int, out: torch.Tensor) -> None:
        """See ``Wire``."""
        words = travelled
        places = words[: self.count]
        ends = torch.tensor([start, start + len(out)], dtype=torch.int32, device=words.device)
        first, last = torch.searchsorted(places, ends).tolist()
        out.zero_()
        values = words[self.count :].view(torch.float32)[first:last]
        out.index_copy_(0, (places[first:last] - start).long(), values)


class Quantized(_Words):
    """Each element as one of 2L + 1 levels from minus to plus the largest magnitude of its block; L = 2**(bits-1) - 1.

    Rounded up or down at random, so that the expectation is the element. The mean square of what is lost is at most
    sqrt(BLOCK) / (2L) of the vector's, the worst case being one large element among many small ones. It must be below 1
    for error feedback not to pile up, which 2 bits or a scale for the whole vector would not keep. Source: QSGD,
    Alistarh et al. 2017, arXiv 1610.02132, with the largest magnitude of a block in place of the norm.

    Args:
        numel: Elements of the vector.
        bits: 4 or 8.
        seed: Of the run; what is drawn depends on it, the worker and the iteration alone.
    """

    def __init__(self, numel: int, bits: int, seed: int = 0) -> None:
        self._bits = bits
        self._seed = seed
        self._levels = 2 ** (bits - 1) - 1
        self._num_blocks = -(-numel // BLOCK)
        self._words_per_block = BLOCK * bits // 32
        super().__init__(self._num_blocks * (1 + self._words_per_block))

    def pack(self, vector: torch.Tensor, out: torch.Tensor, draw: tuple[int, int]) -> None:
        """See ``Wire``; takes a few vectors of memory."""
        blocks = torch.nn.functional.pad(vector, (0, self._num_blocks * BLOCK - len(vector))).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1)
        out[: self._num_blocks].view(torch.float32).copy_(scales)
        seed = int(np.random.SeedSequence((self._seed, *draw)).generate_state(1, np.uint64)[0] >> 1)
        generator = torch.Generator(vector.device).manual_seed(seed)
        steps = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None] * self._levels
        steps += torch.rand(steps.shape, generator=generator, device=vector.device)
        levels = (steps.floor_().clamp_(-self._levels, self._levels) + self._levels).to(torch.uint8)
        if self._bits == 4:
            pairs = levels.view(-1, 2)
            levels = pairs[:, 0] | (pairs[:, 1] << 4)
        out[self._num_blocks :].view(torch.uint8).copy_(levels.view(-1))

    def unpack(self, travelled: torch.Tensor, start: int, out: torch.Tensor) -> None:
        """See ``Wire``."""
        words = travelled
        first, last = start // BLOCK, -(-(start + len(out)) // BLOCK)
        a, b = (self._num_blocks + block * self._words_per_block for block in (first, last))
        levels = words[a:b].view(torch.uint8)
        if self._bits == 4:
            levels = torch.stack((levels & 15, levels >> 4), dim=1)
        scales = words[first:last].view(torch.float32) / self._levels
        values = (levels.view(-1, BLOCK).to(torch.float32) - self._levels).mul_(scales[:, None])
        out.copy_(values.view(-1)[: len(out)])
