"""Launchers of other MPI libraries on this machine, for tests that start jobs with them."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest

from mpicomm import mpi
from tests.launching import OTHER_MPI_ENV, ROOT

_HERE = {
    "OTHER_MPI_ENV": str(ROOT / OTHER_MPI_ENV / "bin" / "mpiexec") if OTHER_MPI_ENV else None,
    "mpiexec.openmpi": shutil.which("mpiexec.openmpi"),  # Debian's
    "mpiexec.mpich": shutil.which("mpiexec.mpich"),
}
each_launcher = pytest.mark.parametrize("other", _HERE)


def launcher(name: str, *, can_start: bool) -> str:
    """Return the path of a launcher; skip the test if it is not installed, or does not match `can_start`.

    Args:
        can_start: Whether it can start programs with the MPI library of this Python. Open MPI's launchers use PMIx;
            Hydra, the launcher of MPICH and Intel MPI, uses PMI.
    """
    path = _HERE[name]
    if path is None:
        pytest.skip(f"{name} is not installed on this machine")
    if (_is_open_mpis(path) == (mpi.library().vendor == "Open MPI")) != can_start:
        pytest.skip(f"{name} can start programs with {mpi.library().vendor}: {not can_start}")
    return path


def variable_of_size(path: str) -> str:
    """Return the variable in which a launcher passes the number of ranks."""
    return "OMPI_COMM_WORLD_SIZE" if _is_open_mpis(path) else "PMI_SIZE"


@functools.cache
def _is_open_mpis(path: str) -> bool:
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return "Open MPI" in version or "OpenRTE" in version
