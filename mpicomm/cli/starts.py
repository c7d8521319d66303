"""Which start a request becomes here: by the scheduler where there is one, or else by the MPI's own launcher."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from mpicomm import mpi, terminal
from mpicomm.cli import surroundings
from mpicomm.startcommand import allocations, by_mpiexec, by_srun, by_torchrun, environment
from mpicomm.startcommand.allocations import PBS, Slurm
from mpicomm.startcommand.request import Node, Request, Start


def of(asked: Request, environ: Mapping[str, str]) -> Start:
    """Return the start.

    Raises:
        LaunchError: If it cannot be, or this is a rank of a job already.
        MPINotFoundError: If there is no MPI to start it with.
    """
    here = surroundings.machine(environ)
    if asked.node is not None:
        return by_torchrun.start(asked, asked.node, here, environ)
    environment.refuse_ranks(environ, [name for _, name in terminal.processes_above()])
    library = mpi.library()
    job = surroundings.allocation(environ)
    if here.gpus or allocations.has_gpus(environ):
        environ = {**environment.of_gpus(library, surroundings.files_in_memory()), **environ}
    if isinstance(job, Slurm) and not asked.hosts:
        kind = by_srun.mpi_type(library, surroundings.mpi_types(), environ)
        if kind is not None:
            return by_srun.start(asked, here, job, kind, environ)
    agent = surroundings.pbs_agent(environ) if isinstance(job, PBS) else None
    mpiexec = surroundings.mpiexec(library, environ)
    return by_mpiexec.start(asked, here, library, mpiexec, environ, job=job, agent=agent)


def by_torchrun_of(asked: Request, environ: Mapping[str, str]) -> Start:
    """Return the start of the same by torchrun: on this host, or on the nodes of an allocation of Slurm's."""
    here, job, port = surroundings.machine(environ), surroundings.allocation(environ), _free_port()
    if isinstance(job, Slurm):
        return by_torchrun.start_by_srun(asked, job, port, here, environ)
    return by_torchrun.start(asked, Node(0, 1, "127.0.0.1", port), here, environ)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
    return port
