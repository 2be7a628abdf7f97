"""The paradigm of a recorded run, with the order of its arrivals to be forced.

One job: find both in the run's folder.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from hydssp import config as configuration
from hydssp.coordination.paradigms import Paradigm, Rules
from hydssp.errors import UserError
from hydssp.simulation.recording import Recording, read_recording

_MUST_BE_ALIKE = ("batch_size", "accumulate", "local_steps", "data")


@dataclass(frozen=True)
class Recorded(Paradigm):
    """Repeats the run in folder ``run``: its paradigm, and its pushes in the order in which they came.

    Raises:
        UserError: When there is no run with a complete event log.
    """

    run: str

    def __post_init__(self) -> None:
        _ = self.recording

    @functools.cached_property
    def recording(self) -> Recording:
        """See ``Paradigm``."""
        return read_recording("paradigm.run", self.run)

    @property
    def rules(self) -> Rules:
        """Those of the recorded run."""
        return configuration.build_paradigm(self.recording.config).rules


def check_repeatable(recording: Recording, config: dict[str, Any]) -> None:
    """Refuse a configuration under which the recorded order has no meaning.

    Args:
        recording: The run to be repeated.
        config: Of the run that repeats it, with its number of workers.

    Raises:
        UserError: Naming the key.
    """
    if config["num_workers"] != recording.num_workers:
        raise UserError(
            f"paradigm.run={recording.path}: the recorded run had {recording.num_workers} workers, this one has "
            f"{config['num_workers']}; start as many"
        )
    for key in _MUST_BE_ALIKE:
        here, before = config.get(key), recording.config.get(key)  # None: the run is older than the key
        if here != before and before is not None:
            raise UserError(
                f"{key}={here}: the recorded run {recording.path} had {before}, and its order "
                "has a meaning only with the same"
            )
