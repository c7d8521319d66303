"""Job scripts for Slurm and PBS: a `JobSpec` says what is wanted, `script` is the text that follows from it."""

from __future__ import annotations

from mpicomm.launch.jobscript import pbs, slurm
from mpicomm.launch.jobscript.spec import JobSpec, Mpi, Scheduler

__all__ = ["JobSpec", "Mpi", "Scheduler", "script"]


def script(spec: JobSpec) -> str:
    """Return the script of a job: the same text for the same job, always."""
    return slurm.script(spec) if spec.scheduler == "slurm" else pbs.script(spec)
