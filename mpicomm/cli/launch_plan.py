"""Builds the launch of a request on this host: with the scheduler's launcher if there is one, else the MPI's own."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from mpicomm import mpi, terminal
from mpicomm.cli import host_info
from mpicomm.launch import allocation, environment
from mpicomm.launch.allocation import PBS, Slurm
from mpicomm.launch.commands import mpiexec, srun, torchrun
from mpicomm.launch.request import Node, Request, Start


def build(asked: Request, environ: Mapping[str, str]) -> Start:
    """Return the launch of a request.

    Raises:
        LaunchError: If the ranks cannot be started, or if this process is a rank of another job.
        MPINotFoundError: If there is no MPI library.
    """
    here = host_info.machine(environ)
    if asked.node is not None:
        return torchrun.start(asked, asked.node, here, environ)
    environment.refuse_ranks(environ, [name for _, name in terminal.processes_above()])
    library = mpi.library()
    job = host_info.current_allocation(environ)
    if here.gpus or allocation.has_gpus(environ):
        environ = {**environment.of_gpus(library, host_info.files_in_memory()), **environ}
    if isinstance(job, Slurm) and not asked.hosts:
        kind = srun.mpi_type(library, host_info.mpi_types(), environ)
        if kind is not None:
            return srun.start(asked, here, job, kind, environ)
    agent = host_info.pbs_agent(environ) if isinstance(job, PBS) else None
    launcher = host_info.mpiexec(library, environ)
    return mpiexec.start(asked, here, library, launcher, environ, job=job, agent=agent)


def build_torchrun(asked: Request, environ: Mapping[str, str]) -> Start:
    """Return the equivalent launch with torchrun: on this host, or on the nodes of a Slurm allocation."""
    here, job, port = host_info.machine(environ), host_info.current_allocation(environ), _free_port()
    if isinstance(job, Slurm):
        return torchrun.start_by_srun(asked, job, port, here, environ)
    return torchrun.start(asked, Node(0, 1, "127.0.0.1", port), here, environ)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
    return port
