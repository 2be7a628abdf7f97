"""The optimizer step on the flat vector, chunk by chunk.

One job: turn gradients into new weights, in pieces small enough that the server can enter its transport between them.
Knows no transport: what to do between two chunks is an argument. An optimizer here must be elementwise, since the
vector is cut at any element; ``check_elementwise`` refuses the others by trying them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from hydssp.errors import UserError
from hydssp.update.chunk import Chunk
from hydssp.update.history import VersionHistory
from hydssp.update.layout import ParameterLayout
from hydssp.update.mitigation import Mitigation, Part, Setting
from hydssp.update.updater import Contribution, Effect
from hydssp.update.wire import BLOCK, Wire

CHUNK_NUMEL = 1 << 17
"""Elements of a chunk: SGD with momentum moves 20 bytes an element, so that this takes a fraction of a millisecond."""

_ALLOWED = "allowed are elementwise optimizers such as torch.optim.SGD or torch.optim.AdamW"

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Builds an optimizer from a list of parameter groups, as torch's constructors take it."""


def group_ranges(
    layout: ParameterLayout, groups: Sequence[Mapping[str, Any]]
) -> list[tuple[int, int, dict[str, Any]]]:
    """Cut the vector into ranges that share one set of options.

    Args:
        layout: The vector.
        groups: Each has ``pattern`` (a shell pattern on parameter names) and options that replace the optimizer's own
            for the parameters it matches. The first match counts; a parameter without one keeps the defaults.

    Returns:
        ``(start, stop, options)`` in rising order, without gaps.

    Raises:
        UserError: When a group has no pattern or matches no parameter.
    """
    for number, group in enumerate(groups):
        if len(group) < 2:
            raise UserError(
                f"parameter_groups[{number}]={dict(group)}: no option beside the pattern; give at least one, e.g. lr"
            )
        pattern = group.get("pattern")
        names = [span.name for span in layout.spans]
        if not isinstance(pattern, str) or not fnmatch.filter(names, pattern):
            raise UserError(
                f"parameter_groups[{number}].pattern={pattern!r}: allowed is a shell pattern that matches a trainable "
                f"parameter; the model has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            )
    ranges: list[tuple[int, int, dict[str, Any]]] = []
    for span in layout.spans:
        chosen = next((g for g in groups if fnmatch.fnmatch(span.name, g["pattern"])), {})
        options = {key: value for key, value in chosen.items() if key != "pattern"}
        if ranges and ranges[-1][2] == options:
            ranges[-1] = (ranges[-1][0], span.stop, options)
        else:
            ranges.append((span.start, span.stop, options))
    return ranges


def check_elementwise(make: MakeOptimizer) -> None:
    """Refuse an optimizer whose step on a vector differs from its steps on the vector's parts.

    Three steps are made on 24 elements, whole and in two pieces of different magnitude, in float64.

    Raises:
        UserError: When the results differ (LARS, LAMB, Adafactor), when a step needs a closure (LBFGS) or a matrix
            (Muon), or when the optimizer cannot be built at all.
    """
    name = getattr(getattr(make, "func", make), "__name__", "this optimizer")
    try:
        make([{"params": [torch.nn.Parameter(torch.zeros(1))]}])
    except OSError as error:
        raise UserError(
            f"optimizer: torch cannot use a folder that it needs ({type(error).__name__}: {error}); let "
            "TORCHINDUCTOR_CACHE_DIR and TMPDIR name folders that exist and can be written to, or unset them"
        ) from error
    except Exception as error:
        raise UserError(
            f"optimizer: {name} refuses its arguments ({type(error).__name__}: {error}); correct them, or take one out "
            "with ~optimizer.KEY"
        ) from error
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(24, generator=generator, dtype=torch.float64)
    start[:7] *= 100
    gradients = torch.randn(3, 24, generator=generator, dtype=torch.float64)
    results = []
    try:
        for cuts in ([0, 24], [0, 7, 24]):
            weights = start.clone()
            for a, b in pairwise(cuts):
                parameter = torch.nn.Parameter(weights[a:b])
                optimizer = make([{"params": [parameter]}])
                for gradient in gradients:
                    parameter.grad = gradient[a:b].clone()
                    optimizer.step()
            results.append(weights)
    except Exception as error:
        raise UserError(
            f"optimizer: {name} cannot step on a vector ({type(error).__name__}: {error}); {_ALLOWED}"
        ) from error
    if not torch.isfinite(results[0]).all():
        raise UserError(
            f"optimizer: {name} makes weights that are not finite; check optimizer.lr and its other numbers"
        )
    if not torch.allclose(results[0], results[1], rtol=1e-9, atol=1e-12):
        raise UserError(
            f"optimizer: {name} is not elementwise (its step depends on norms over a tensor), and the server updates "
            f"the weights in chunks; {_ALLOWED}"
        )


def check_groups(make: MakeOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse options of parameter groups that the optimizer does not know; torch would take and ignore them.

    Raises:
        UserError: Naming the group and the option.
    """
    known = make([{"params": [torch.nn.Parameter(torch.zeros(1))]}]).defaults
    for number, group in enumerate(groups):
        for key in set(group) - {"pattern"} - set(known):
            raise UserError(
                f"parameter_groups[{number}].{key}={group[key]}: the optimizer has no such option; allowed is "
                f"{', '.join(sorted(known))}"
            )


class ChunkedOptimizer:
    """One optimizer instance per chunk of the vector; steps them in order. An ``Updater``.

    Args:
        weights: The vector, 1-D.
        make: Builds the optimizer of a chunk.
        ranges: See ``group_ranges``.
        chunk_numel: Elements of the largest chunk.
        mitigation: What is done to stale gradients; belongs to this object from now on. None: nothing.
        num_workers: P.
        tensors: ``(start, stop)`` of each parameter tensor; None: the ranges.
        wire: The format in which gradients come; None: as the weights. Another one takes a vector of the weights' type
            for each gradient of the largest update.

    Attributes:
        weights: The vector that is updated in place, 1-D.
        values: The same memory for numpy.
        steps: Number of calls of ``step`` so far.
        chunk_numel: Elements of the largest piece worked on at a time.
        history: Old weights; None where the mitigation does not ask for them.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        make: MakeOptimizer,
        ranges: Iterable[tuple[int, int, dict[str, Any]]],
        chunk_numel: int = CHUNK_NUMEL,
        *,
        mitigation: Mitigation | None = None,
        num_workers: int = 1,
        tensors: Sequence[tuple[int, int]] | None = None,
        wire: Wire | None = None,
    ) -> None:
        self.weights = weights
        self.values = weights.numpy()
        self.steps = 0
        self.chunk_numel = chunk_numel
        self._factor = 1.0
        self._wire = wire or Wire("fp32", weights.dtype)
        self._decoded: list[torch.Tensor] = []
        self._chunks: list[Chunk] = []
        ranges = list(ranges)
        for start, stop, options in ranges:
            for a in range(start, stop, chunk_numel):
                b = min(a + chunk_numel, stop)
                parameter = torch.nn.Parameter(weights[a:b])
                optimizer = make([{"params": [parameter], **options}])
                self._chunks.append(Chunk(len(self._chunks), a, b, parameter, optimizer))
        self._mitigation = mitigation or Mitigation()
        self.history = VersionHistory(weights) if self._mitigation.uses_old_weights else None
        spans = [(start, stop) for start, stop, _ in ranges] if tensors is None else tensors
        self._mitigation.bind(Setting(self._chunks, spans, weights.numel(), weights.dtype, num_workers))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group as the latest step used it."""
        return self._chunks[0].lr

    def granted(self, worker: int) -> None:
        """``worker`` is about to compute a gradient from the weights as they are now."""
        if self.history is not None:
            self.history.granted(worker)

    def step(
        self,
        contributions: Sequence[Contribution],
        lr_factor: float,
        after_chunk: Callable[[int, int], None],
    ) -> list[Effect]:
        """Make one update from the weighted sum of gradients, summed in the order given.

        Args:
            contributions: At least one, of different workers; each gradient has as many elements as the weights, of the
                wire's type.
            lr_factor: Factor on every configured learning rate for this step.
            after_chunk: Called with ``(start, stop)`` when these elements of ``weights`` are final; with an empty
                range after a chunk's worth of other work.

        Returns:
            What the mitigation found out about each contribution; empty if nothing.
        """
        travelled = [self._wire.tensor(c.gradient) for c in contributions]
        gradients = travelled if self._wire.is_plain else self._room_for(len(travelled))
        parts = [
            Part(c.worker, gradient, c.weight, c.staleness)
            for c, gradient in zip(contributions, gradients, strict=True)
        ]
        workers = [part.worker for part in parts]
        if not self._wire.is_plain:
            self._unpack(travelled, gradients, after_chunk)
        history = self.history
        if history is not None:
            for part in parts:
                part.used, part.is_exact = history.used(part.staleness)
            history.begin_update(workers)
        self._set_rate(lr_factor * self._mitigation.weigh(parts))
        self._mitigation.begin(parts, lambda: after_chunk(0, 0))
        for chunk in self._chunks:
            kept = history.room(chunk.start, chunk.stop) if history is not None else None
            self._mitigation.step(chunk, parts, kept)
            after_chunk(chunk.start, chunk.stop)
        if history is not None:
            history.end_update(workers)
        self.steps += 1
        return self._mitigation.end(parts)

    def _room_for(self, count: int) -> list[torch.Tensor]:
        """Vectors to decode gradients into, the same ones each time."""
        while len(self._decoded) < count:
            self._decoded.append(torch.empty_like(self.weights))
        return self._decoded[:count]

    def _unpack(
        self,
        travelled: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        after_chunk: Callable[[int, int], None],
    ) -> None:
        size = -(-self.chunk_numel // BLOCK) * BLOCK
        for short, gradient in zip(travelled, gradients, strict=True):
            for start in range(0, len(gradient), size):
                self._wire.unpack(short, start, gradient[start : start + size])
                after_chunk(0, 0)

    def _set_rate(self, factor: float) -> None:
        if factor != self._factor:
            for chunk in self._chunks:
                chunk.options["lr"] = chunk.initial_lr * factor
            self._factor = factor
