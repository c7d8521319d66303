"""Finds the mpiexec that belongs to an MPI library: candidate paths, and a check of each candidate's version."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from mpicomm.launch.detect import Library

_NAMES = {  # unambiguous names first: Debian installs the launchers of several MPIs in one directory
    "Open MPI": ("mpiexec.openmpi", "mpiexec"),
    "MPICH": ("mpiexec.mpich", "mpiexec", "mpiexec.hydra"),
    "Intel MPI": ("mpiexec", "mpiexec.hydra"),  # its mpirun runs the first mpiexec.hydra in PATH, maybe of another MPI
    "MVAPICH": ("mpiexec", "mpiexec.hydra"),
}
_PACKAGES = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}
_OPEN_MPI = re.compile(r"\((?:Open MPI|OpenRTE)\) v?(\d+)")


def candidates(library: Library, path: Sequence[str]) -> list[str]:
    """Return candidate paths of the library's mpiexec: in `bin` directories above the library first, then in PATH.

    Args:
        path: The directories of PATH.
    """
    above = [parent / "bin" for parent in Path(library.path).parents] if library.path else []
    names = _NAMES.get(library.vendor, ("mpiexec",))
    places = [*above, *[Path(each) for each in path if each]]
    return list(dict.fromkeys(str(place / name) for place in places for name in names))


def above(library: Library) -> str:
    """Return the first executable candidate in a `bin` directory above the library, else `mpiexec`. Runs no command."""
    return next((path for path in candidates(library, []) if os.access(path, os.X_OK)), "mpiexec")


def fits(library: Library, output: str) -> bool:
    """Return whether a launcher with this output of `--version` can start programs with this library."""
    if match := _OPEN_MPI.search(output):
        return library.vendor == "Open MPI" and library.version.split(".")[0] == match[1]
    if "Intel(R) MPI" in output:
        return library.vendor == "Intel MPI"
    return library.vendor in ("MPICH", "MVAPICH") and "HYDRA build details" in output


def not_found(library: Library, others: Sequence[str]) -> str:
    """Return the error message for a library without a launcher.

    Args:
        others: Launchers that were found but belong to another MPI.
    """
    package = _PACKAGES.get(library.vendor)
    install = f"pip install {package}=={library.version}, or load" if package else "Load"
    met = f"Found launchers of other MPIs: {', '.join(others)}.\n" if others else ""
    where = f"above {library.path} and in PATH" if library.path else "in PATH"
    return (
        f"mpiexec of {library.vendor} {library.version}, which mpi4py loads, was not found.\n"
        f"Searched for {' and '.join(_NAMES.get(library.vendor, ('mpiexec',)))} in each bin directory {where}.\n"
        f"{met}{install} your site's module, or use the site's own launcher."
    )
