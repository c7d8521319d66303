"""Refuses a job on fewer hosts than a Kubernetes operator gave it, because the launcher ignored the host file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm import mpi
from mpicomm.errors import LaunchError
from mpicomm.launch import mpi_operator


def refuse(environ: Mapping[str, str], hosts: Sequence[str]) -> None:
    """Raise LaunchError if an operator's host file, which the launcher ignored, names more hosts than have ranks.

    Only the launcher's container has the file. A rank elsewhere was started with the file, or with other hosts.

    Args:
        hosts: The host of every rank.
    """
    library = mpi.library()
    if (found := mpi_operator.ignored_host_file(environ, library)) is None:
        return
    try:
        text = Path(found[1]).read_text()
    except OSError:
        return
    if problem := mpi_operator.problem(text, found, library, hosts):
        raise LaunchError(problem)
