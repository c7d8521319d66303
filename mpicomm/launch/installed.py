"""The launchers installed on this host: the mpiexec of an MPI library, and the types of PMI that srun supports."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

from mpicomm.errors import LaunchError
from mpicomm.launch import scheduler_query
from mpicomm.launch.mpi_library import Library


@functools.cache
def answer_of(*command: str) -> str:
    """Return the output of a command that always prints the same: `--max-restarts` starts many programs."""
    return scheduler_query.output_of(command, with_errors=True)


def mpiexec(library: Library, path: str) -> str:
    """Return the path of the launcher that belongs to the library.

    Args:
        path: The value of PATH.

    Raises:
        LaunchError: If no such launcher is found.
    """
    others = []
    for candidate in library.mpiexec_candidates(path.split(os.pathsep)):
        if not os.access(candidate, os.X_OK) or Path(candidate).is_dir():
            continue
        if library.owns_mpiexec(answer_of(candidate, "--version")):
            return candidate
        others.append(candidate)
    raise LaunchError(library.mpiexec_not_found(others))


def srun_list() -> str:
    """Return the output of `srun --mpi=list`; empty without Slurm."""
    return answer_of("srun", "--mpi=list") if shutil.which("srun") else ""
