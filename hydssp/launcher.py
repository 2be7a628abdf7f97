"""What the launcher's environment variables say before MPI is started.

One job: read them, all of them, here. Rank facts for training come from MPI itself; these serve only to decide which
process speaks, and to notice that a launcher meant more ranks than MPI sees. Pure: the environment is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# (launcher, rank, size): the launcher of the MPI library comes before the batch system, whose variables are also set
# inside an allocation for a program that was not started by srun.
_VARIABLES = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("a PMI launcher (MPICH or Intel mpiexec, srun --mpi=pmi2)", "PMI_RANK", "PMI_SIZE"),
    ("MVAPICH's launcher", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PALS (Cray)", "PALS_RANKID", "PALS_SIZE"),
    ("PMIx", "PMIX_RANK", "PMIX_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True)
class Launch:
    """How this process was started; rank 0 of 1 when nothing is known."""

    launcher: str
    rank: int
    size: int

    @property
    def is_launched(self) -> bool:
        """True when a launcher meant more than one rank."""
        return self.size > 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Launch:
        """Read the first launcher whose variables are both there."""
        for launcher, rank, size in _VARIABLES:
            if rank in environment and size in environment:
                return cls(launcher, int(environment[rank]), int(environment[size]))
        return cls("", 0, 1)
