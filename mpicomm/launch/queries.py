"""Queries of the scheduler: the output of its commands, and the allocation in which this process runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm.launch import allocation, environment
from mpicomm.launch.allocation import Allocation, FluxAllocation

_QUERY_SECONDS = 20.0  # time limit of a command


def output_of(command: Sequence[str], *, with_errors: bool = False) -> str:
    """Return the output of a command; empty if it cannot be run or times out.

    Args:
        with_errors: Return its standard error, too.
    """
    try:
        done = subprocess.run(
            command,
            env={**environment.with_home(os.environ), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_errors else subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_QUERY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def current_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of this job; None outside one.

    Raises:
        LaunchError: If the scheduler's list of hosts, or Flux's resources, cannot be read.
    """
    if environ.get(allocation.FLUX) and shutil.which("flux"):  # SLURM_* may describe the job that contains the instance
        return FluxAllocation.from_output(output_of(FluxAllocation.query, with_errors=True))
    return allocation.from_environ(environ, lambda path: Path(path).read_text())
