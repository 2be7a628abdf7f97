"""The same server, coordinator and workers in virtual time: a described cluster instead of a real one. Never MPI."""
