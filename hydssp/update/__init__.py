"""How weights look in memory and how a gradient changes them: torch, but no MPI, Hydra or coordination."""
