"""Job scripts for Slurm and PBS: a `JobSpec` describes the job, `script` generates the text."""

from __future__ import annotations

from mpicomm.launch.jobscript import pbs, slurm
from mpicomm.launch.jobscript.spec import JobSpec, Mpi, Scheduler

__all__ = ["JobSpec", "Mpi", "Scheduler", "script"]


def script(spec: JobSpec) -> str:
    """Return the text of a job script; equal specs give equal texts."""
    return slurm.script(spec) if spec.scheduler == "slurm" else pbs.script(spec)
