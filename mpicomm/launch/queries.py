"""Queries of launchers and schedulers on this host; the only module of `launch` that runs commands."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm.errors import LaunchError
from mpicomm.launch import allocation, containers, environment
from mpicomm.launch.allocation import Allocation, FluxAllocation
from mpicomm.launch.mpi_library import Implementation, Library

_QUERY_SECONDS = 20.0  # time limit of a command: a busy scheduler answers within seconds, a lost one never


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
    # Flux first: SLURM_* may describe the job that contains the instance.
    if environ.get(allocation.FLUX_VARIABLE) and shutil.which("flux"):
        return FluxAllocation.from_output(output_of(FluxAllocation.query, with_errors=True))
    return allocation.from_environ(environ, lambda path: Path(path).read_text())


@functools.cache
def constant_output(*command: str) -> str:
    """Return the output of a command that always prints the same: `--max-restarts` starts many programs."""
    return output_of(command, with_errors=True)


def mpiexec(
    library: Library, path: str, launchers: Sequence[Implementation] | None = None
) -> tuple[str, Implementation]:
    """Return the path and the description of the best mpiexec that can start ranks of the library.

    Args:
        path: The value of PATH.
        launchers: Those of the library's launchers to search for; None for all.

    Raises:
        LaunchError: If no such launcher is found.
    """
    candidates = library.mpiexec_candidates(path.split(os.pathsep))
    executables = [path for path in candidates if os.access(path, os.X_OK) and not Path(path).is_dir()]
    for launcher in launchers or library.launchers:
        for executable in executables:
            if library.launcher_with(constant_output(executable, "--version")) == launcher:
                return executable, launcher
    raise LaunchError(library.mpiexec_not_found(executables, launchers[0] if launchers else None))


def container_commands(path: str) -> dict[str, str]:
    """Return the installed container runtimes by name, with the command of each.

    Args:
        path: The value of PATH.
    """
    commands = {}
    for name, runtime in containers.RUNTIMES.items():
        installed = next((command for command in runtime.commands if shutil.which(command, path=path)), None)
        if installed and (not runtime.is_plugin or runtime.srun_option in constant_output(installed, "--help")):
            commands[name] = installed
    return commands


def slurm_binds() -> bool:
    """Return whether this Slurm can bind tasks: without its plugin task/affinity, srun ignores --cpu-bind."""
    lines = constant_output("scontrol", "show", "config").splitlines()
    return any(line.startswith("TaskPlugin ") and "affinity" in line for line in lines)


def srun_list() -> str:
    """Return the output of `srun --mpi=list`; empty without Slurm."""
    return constant_output("srun", "--mpi=list") if shutil.which("srun") else ""
