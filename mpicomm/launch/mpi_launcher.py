"""Which mpiexec belongs to a library: where to look, and whether what is found there is the one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from mpicomm.launch.detect import Library

_NAMES = {  # those first that cannot be another's: Debian installs several in one directory
    "Open MPI": ("mpiexec.openmpi", "mpiexec"),
    "MPICH": ("mpiexec.mpich", "mpiexec", "mpiexec.hydra"),
    "Intel MPI": ("mpiexec", "mpiexec.hydra"),  # its mpirun runs the first mpiexec.hydra in PATH, maybe another MPI's
    "MVAPICH": ("mpiexec", "mpiexec.hydra"),
}
_PACKAGES = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}
_OPEN_MPI = re.compile(r"\((?:Open MPI|OpenRTE)\) v?(\d+)")


def candidates(library: Library, path: Sequence[str]) -> list[str]:
    """Return where the library's mpiexec may be: in a bin above the library first, then in PATH.

    Args:
        path: The directories of PATH.
    """
    above = [parent / "bin" for parent in Path(library.path).parents] if library.path else []
    names = _NAMES.get(library.vendor, ("mpiexec",))
    places = [*above, *[Path(each) for each in path if each]]
    return list(dict.fromkeys(str(place / name) for place in places for name in names))


def above(library: Library) -> str:
    """Return the first candidate in a bin above the library, or `mpiexec` where there is none. Nothing is run."""
    return next((path for path in candidates(library, []) if os.access(path, os.X_OK)), "mpiexec")


def fits(library: Library, output: str) -> bool:
    """Tell whether a launcher that answers `--version` so can start programs with this library."""
    if match := _OPEN_MPI.search(output):
        return library.vendor == "Open MPI" and library.version.split(".")[0] == match[1]
    if "Intel(R) MPI" in output:
        return library.vendor == "Intel MPI"
    return library.vendor in ("MPICH", "MVAPICH") and "HYDRA build details" in output


def not_found(library: Library, others: Sequence[str]) -> str:
    """Say that there is none.

    Args:
        others: Launchers that were found and belong to another MPI.
    """
    package = _PACKAGES.get(library.vendor)
    install = f"pip install {package}=={library.version}, or load" if package else "Load"
    met = f"Found, but of another MPI: {', '.join(others)}.\n" if others else ""
    where = f"above {library.path} and in PATH" if library.path else "in PATH"
    return (
        f"no mpiexec of {library.vendor} {library.version}, which mpi4py loads, was found.\n"
        f"Looked for {' and '.join(_NAMES.get(library.vendor, ('mpiexec',)))} in each bin {where}.\n"
        f"{met}{install} your site's module, or start with the site's own launcher."
    )
