"""The MPI libraries of the suite: from wheels, and from Debian's packages.

`python -m tests.compat.mpis` installs the packages with apt-get, if a launcher is missing.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("openmpi-bin", "libopenmpi-dev", "mpich", "libmpich-dev")
"""Debian's packages of Open MPI and MPICH."""


@dataclasses.dataclass(frozen=True)
class MPI:
    """The location of one MPI library."""

    extra: str = ""
    """The extra of mpicomm that installs the library; empty for a library of the system."""

    suffix: str = ""
    """The suffix of the system's commands."""

    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The variables with which ranks and mpi4py find the library."""

    library: str = ""
    """The library file to link as libmpi.so.12 for wheels of mpi4py; empty if no link is needed."""

    def command(self, name: str, environment: Path) -> str:
        """Return the path of a command such as mpiexec.

        Raises:
            FileNotFoundError: If the system does not have the command.
        """
        if self.extra:
            return str(environment / "bin" / name)
        if (found := shutil.which(f"{name}{self.suffix}")) is None:
            raise FileNotFoundError(
                f"{name}{self.suffix} is not installed.\nInstall Debian's, as root: python -m tests.compat.mpis"
            )
        return found


MPIS = {
    "openmpi": MPI("openmpi"),
    "mpich": MPI("mpich"),
    "intel": MPI("intel"),
    "system-openmpi": MPI(suffix=".openmpi", environ={"MPI4PY_LIBMPI": "libmpi.so.40"}),
    "system-mpich": MPI(suffix=".mpich", environ={"MPI4PY_LIBMPI": "libmpich.so.12"}, library="libmpich.so.12"),
}


def install() -> None:
    """Install Debian's packages, unless both launchers are installed."""
    if all(shutil.which(f"mpiexec{mpi.suffix}") for mpi in MPIS.values() if mpi.suffix):
        return
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        subprocess.run(["apt-get", "-qq", *command], check=True, env=environ, stdout=sys.stderr)


if __name__ == "__main__":
    install()
