"""Which launcher starts the ranks: the user's, that of the scheduler, or an mpiexec that fits the MPI library."""

from __future__ import annotations

from mpicomm.errors import LaunchError
from mpicomm.launch.allocation import Allocation, FluxAllocation, SlurmAllocation
from mpicomm.launch.mpi_library import Library
from mpicomm.launch.request import Request

MPIEXEC, PALS, SRUN, IBRUN, FLUX = "mpiexec", "pals", "srun", "ibrun", "flux"
LAUNCHERS = (MPIEXEC, PALS, SRUN, IBRUN, FLUX)
"""The values of `mpicomm run --launcher`."""

_SCHEDULERS: dict[str, tuple[type[SlurmAllocation | FluxAllocation], str]] = {
    SRUN: (SlurmAllocation, "salloc -n 4"),
    IBRUN: (SlurmAllocation, "idev -n 4"),
    FLUX: (FluxAllocation, "flux alloc -n 4"),
}
"""The launchers of a scheduler: its allocation, and a command that makes one."""


def select(
    request: Request, library: Library, job: Allocation | None, *, srun_type: str | None, is_ibrun_site: bool
) -> str:
    """Return the launcher of the ranks, one of `LAUNCHERS`.

    Args:
        srun_type: The value of `srun --mpi=` for this library; None if srun cannot connect its ranks.
        is_ibrun_site: Whether ibrun starts the ranks of this library.

    Raises:
        LaunchError: If the user's launcher cannot start the ranks here.
    """
    if request.launcher is not None:
        _check(request.launcher, request, library, job, srun_type)
        return request.launcher
    if request.hosts:
        return MPIEXEC
    if isinstance(job, FluxAllocation):
        return FLUX
    # Slurm ends the step if a task is killed; mpirun does not.
    if isinstance(job, SlurmAllocation) and not request.is_fault_tolerant:
        if is_ibrun_site and job.groups == 1:
            return IBRUN
        if srun_type is not None:
            return SRUN
    return MPIEXEC


def _check(launcher: str, request: Request, library: Library, job: Allocation | None, srun_type: str | None) -> None:
    if launcher == PALS and not library.launchers_of_pals:
        raise LaunchError(
            f"--launcher pals: PALS starts ranks of Cray MPICH and of MPICH, got {library.title}.\n"
            f"Load the site's module of its MPI, and install mpi4py for it, or remove --launcher."
        )
    if launcher not in _SCHEDULERS:
        return
    kind, example = _SCHEDULERS[launcher]
    if not isinstance(job, kind):
        place = "outside of a job" if job is None else f"in a job of {job.title}"
        raise LaunchError(
            f"--launcher {launcher} needs an allocation of {kind.title}, got a process {place}.\n"
            f"Start it in an allocation ({example}), or remove --launcher."
        )
    if launcher == IBRUN and isinstance(job, SlurmAllocation) and job.groups > 1:
        raise LaunchError(
            f"--launcher ibrun: ibrun starts ranks in one component of a job, and this one has {job.groups}.\n"
            f"Use --launcher srun, or remove --launcher."
        )
    if request.hosts:
        raise LaunchError(
            f"--hosts and --hostfile do not work with --launcher {launcher}, which starts the ranks on the hosts of "
            f"its job.\nRemove them, or use --launcher {MPIEXEC}."
        )
    if launcher == SRUN and srun_type is None:
        raise LaunchError(
            f"--launcher srun: srun has no PMI for {library.title}, which needs {' or '.join(library.srun_types)}.\n"
            f"`srun --mpi=list` prints those of this Slurm. Remove --launcher, to start the ranks by mpiexec."
        )
