"""Job scripts: a `JobSpec` describes a job of a scheduler, a `KubernetesJob` one of Kubernetes; `script` writes it."""

from __future__ import annotations

from pathlib import Path

from mpicomm.launch.jobscript.kubernetes import KubernetesJob
from mpicomm.launch.jobscript.schedulers import SCHEDULERS
from mpicomm.launch.jobscript.spec import JobSpec

__all__ = ["SCHEDULERS", "JobSpec", "KubernetesJob", "script"]


def script(job: JobSpec | KubernetesJob, template_file: Path | None = None) -> str:
    """Return the text of a job script or a manifest; equal descriptions give equal texts.

    Args:
        template_file: The template to fill; by default that of the package for this scheduler or kind of manifest.

    Raises:
        ValueError: If the template is invalid.
    """
    from mpicomm.launch.jobscript import template  # imports jinja2, which no other command needs

    name = job.kind if isinstance(job, KubernetesJob) else job.scheduler
    return template.fill(template_file or template.DIRECTORY / f"{name}.j2", job)
