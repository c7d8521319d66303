"""Job scripts for Slurm and PBS: a `JobSpec` describes the job, `script` generates the text."""

from __future__ import annotations

from mpicomm.launch.jobscript.spec import OPTIONS, SCHEDULERS, JobSpec

__all__ = ["OPTIONS", "SCHEDULERS", "JobSpec", "script"]


def script(spec: JobSpec) -> str:
    """Return the text of a job script; equal specs give equal texts."""
    return spec.system.script(spec)
