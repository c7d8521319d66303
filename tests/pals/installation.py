"""Installs the stand-ins in a directory, for jobs that find them in PATH."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomm import mpi
from tests.launching import OTHER_MPI_ENV, ROOT

HERE = Path(__file__).resolve().parent


def mpich_python() -> Path:
    """Return the Python of the environment with MPICH, which the stand-in needs; skip the test without one."""
    if mpi.library().vendor == "MPICH":
        return Path(sys.executable)
    python = Path(OTHER_MPI_ENV or "/", "bin", "python").absolute()
    if OTHER_MPI_ENV is None or not python.with_name("mpiexec.hydra").exists():
        pytest.skip("no environment with MPICH; OTHER_MPI_ENV names it")
    return python


def install(directory: Path, python: Path) -> dict[str, str]:
    """Install PALS's mpiexec and Cray MPICH, and return the variables of a job that uses them, without PATH.

    Args:
        directory: Becomes the first directory of PATH.
        python: The result of `mpich_python`.
    """
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler for the stand-in of Cray MPICH")
    library = directory / "libcray_mpich.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "cray_mpich.c"], check=True)
    launcher = directory / "mpiexec"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "mpiexec.py"} "$@"\n')
    launcher.chmod(0o755)
    return {
        "STAND_IN_HYDRA": str(python.with_name("mpiexec.hydra")),
        "LD_PRELOAD": str(library),
        "PYTHONPATH": str(ROOT),
    }


def of_job(nodefile: Path, hosts: list[str]) -> dict[str, str]:
    """Write the host file of a PBS job, with one line for each rank, and return the variables of the job."""
    nodefile.write_text("".join(f"{host}\n" for host in hosts))
    return {"PBS_JOBID": "7.pbs1", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": str(nodefile)}
