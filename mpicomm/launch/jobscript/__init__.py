"""Job scripts: a `JobSpec` describes a job of a scheduler, a `KubernetesJob` one of Kubernetes; `script` writes it."""

from __future__ import annotations

from mpicomm.launch.jobscript import kubernetes
from mpicomm.launch.jobscript.kubernetes import KubernetesJob
from mpicomm.launch.jobscript.spec import OPTIONS, SCHEDULERS, JobSpec

__all__ = ["OPTIONS", "SCHEDULERS", "JobSpec", "KubernetesJob", "script", "submission"]


def script(spec: JobSpec | KubernetesJob) -> str:
    """Return the text of a job script or a manifest; equal specs give equal texts."""
    return kubernetes.text(spec) if isinstance(spec, KubernetesJob) else spec.system.script(spec)


def submission(spec: JobSpec | KubernetesJob, file: str) -> str:
    """Return the command line that submits a script."""
    return kubernetes.submission(file) if isinstance(spec, KubernetesJob) else spec.system.submission(file)
