"""Gap-Aware's whole step on one chunk, written so that torch.compile can make one kernel of it.

One job: the arithmetic that ``gap_aware``, ``dana`` and ``penalty`` do in a dozen passes over a chunk, with SGD's own
step in it, for one gradient. Keeps no state. Compiling takes a C++ compiler and some 20 s, once per process and faster
where torch finds its cache; ``probe`` says beforehand whether it works.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from hydssp.errors import UserError

PROBED_NUMELS = (64, 1 << 17)
"""One on each side of the size from which torch compiles in another way."""


class Numbers(NamedTuple):
    """The scalars of a step, in the order in which ``gap_aware_step`` gets them as a tensor.

    Attributes:
        lr: The learning rate.
        momentum: SGD's.
        new_share: The step is ``new_share * divided gradient + velocity_share * velocity``: 0 and 1, or with Nesterov's
            look-ahead 1 and the momentum.
        velocity_share: See ``new_share``.
        weight: Factor on the gradient; negative where the optimizer goes up.
        decay: Factor on the weights that are added to the gradient; negative likewise.
        root: C is ``root * sqrt(square) + least``.
        least: See ``root``.
        learn: Factor on the squares that are added to ``square``.
    """

    lr: float
    momentum: float
    new_share: float
    velocity_share: float
    weight: float
    decay: float
    root: float
    least: float
    learn: float


def gap_aware_step(
    weights: torch.Tensor,
    used: torch.Tensor,
    gradient: torch.Tensor,
    square: torch.Tensor,
    velocity: torch.Tensor,
    momenta: torch.Tensor | None,
    kept: torch.Tensor,
    numbers: torch.Tensor,
) -> torch.Tensor:
    """Divide the gradient by its gap, make SGD's step with it and enter the velocity into the mean square.

    Args:
        weights: Of the chunk, [n]; changed, as are ``square``, ``velocity`` and ``momenta``.
        used: What the gradient was computed from, [n].
        gradient: [n].
        square: E in its scaled form, [n].
        velocity: The momentum buffer, [n]; DANA's v_i.
        momenta: The sum of all workers' velocities, [n]; the gap is then DANA's. None: Gap-Aware alone.
        kept: Gets the weights as they were, [n].
        numbers: ``Numbers``, of the same dtype.

    Returns:
        [3]: sum of the squares of the gap, sum of the penalties, largest penalty.
    """
    lr, momentum, new_share, velocity_share, weight, decay, root, least, learn = numbers.unbind()
    kept.copy_(weights)
    position = weights if momenta is None else weights + lr * momentum * (momenta - velocity)
    gap = (position - used).abs()
    penalty = 1.0 + gap / (root * square.sqrt() + least)
    divided = (weight * gradient + decay * weights) / penalty
    new = momentum * velocity + divided
    if momenta is not None:
        momenta.add_(new - velocity)
    weights.sub_(lr * (new_share * divided + velocity_share * new))
    velocity.copy_(new)
    square.add_(learn * new * new)
    return torch.stack([(gap * gap).sum(), penalty.sum(), penalty.max()])


@functools.cache
def compiled() -> Callable[..., torch.Tensor]:
    """``gap_aware_step`` as a kernel; compiled when it is first called with tensors of a dtype."""
    # A pool of compiling processes would stay beside the server for the sake of one kernel.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return torch.compile(gap_aware_step, dynamic=True)


def probe(dtype: torch.dtype, *, is_dana: bool) -> None:
    """Compile and run the kernel once.

    Raises:
        UserError: When that fails, with torch's reason.
    """
    numbers = torch.ones(len(Numbers._fields), dtype=dtype)
    try:
        for numel in PROBED_NUMELS:
            # Seven tensors, as in a run: views of one would be compiled in another way.
            weights, used, gradient, square, velocity, momenta, kept = (
                torch.ones(numel, dtype=dtype) for _ in range(7)
            )
            compiled()(
                weights,
                used,
                gradient,
                square,
                velocity,
                momenta if is_dana else None,
                kept,
                numbers,
            )
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise UserError(
            f"mitigation.compiled=true: torch.compile fails ({type(error).__name__}: {reason}); where rank 0 runs it "
            "needs a C++ compiler (g++, or the one that CXX names), Python's headers, and a folder to write to "
            "(TORCHINDUCTOR_CACHE_DIR, else TMPDIR); give it these, or set mitigation.compiled=false"
        ) from error
