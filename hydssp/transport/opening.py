"""The MPI transports by their names, for a program that takes the name from its configuration.

Imports MPI only when a transport is opened.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hydssp.errors import UserError

if TYPE_CHECKING:
    from hydssp.transport.mpi import MpiServer, MpiWorker

MPI_TRANSPORTS = {
    "rma": ("hydssp.transport.rma", "RmaServer", "RmaWorker"),
    "two_sided": ("hydssp.transport.two_sided", "TwoSidedServer", "TwoSidedWorker"),
}
"""Name in the configuration: module, server end, worker end."""


def open_server(name: str, comm: Any, numel: int, dtype: Any, **options: Any) -> MpiServer:
    """Open rank 0's end. Collective, with ``open_worker`` on all other ranks of ``comm``.

    Args:
        name: One of ``MPI_TRANSPORTS``.
        comm: An MPI communicator.
        numel: Elements of the weight vector.
        dtype: float32 or float64.
        **options: Further arguments of the end: slots, chunk_bytes, num_buffers, pull_dtype, push_dtype,
            request_based.

    Raises:
        UserError: On every rank, when a value is not allowed or the ranks disagree.
    """
    server: MpiServer = _end(name, 1)(comm, numel, dtype, **options)
    return server


def open_worker(name: str, comm: Any, numel: int, dtype: Any, **options: Any) -> MpiWorker:
    """Open a worker's end; arguments and errors as for ``open_server``. Collective."""
    worker: MpiWorker = _end(name, 2)(comm, numel, dtype, **options)
    return worker


def _end(name: str, place: int) -> Any:
    if name not in MPI_TRANSPORTS:
        raise UserError(
            f"transport.name={name}: allowed are {', '.join(MPI_TRANSPORTS)}, or local without a launcher"
        )
    row = MPI_TRANSPORTS[name]
    return getattr(import_module(row[0]), row[place])
