"""The requested versions of a run of the suite, and their requirements for pip. Pure functions."""

from __future__ import annotations

import dataclasses
import re
import sys

NEWEST, OLDEST = "newest", "oldest"
_CHOSEN = ("torch", "numpy", "mpi4py")  # the packages whose versions a request chooses; constraints.txt pins the others


@dataclasses.dataclass(frozen=True)
class Request:
    """The versions of one environment."""

    torch: str
    """A version, or `NEWEST`."""

    mpi: str
    """A key of `mpis.MPIS`."""

    mpi4py: str = ""
    """A version; if empty, the newest that the package accepts."""

    numpy: str = ""
    """A version; if empty, the newest that torch accepts."""

    builds_mpi4py: bool = False
    """Whether mpi4py is compiled with this MPI, instead of installed from a wheel."""

    @property
    def name(self) -> str:
        """The name of the environment, which does not contain the replaceable versions of mpi4py and NumPy."""
        return "torch-{}-python-{}.{}-{}".format(self.torch, *sys.version_info[:2], self.mpi)

    def requirement(self, package: str) -> str:
        """Return the requirement for pip of torch, mpi4py or numpy."""
        version: str = getattr(self, package)
        return package if version in ("", NEWEST) else f"{package}=={version}"


def has_wheels(mpi4py: str) -> bool:
    """Return whether the package index has wheels of a version of mpi4py: from 4.1 on."""
    return not mpi4py or tuple(map(int, mpi4py.split(".")[:2])) >= (4, 1)


def version(text: str, pyproject: str) -> str:
    """Return the version of torch for `--torch`; for `oldest`, the lowest that pyproject.toml allows.

    Raises:
        ValueError: If pyproject.toml has no lowest version.
    """
    if text != OLDEST:
        return text
    found = re.search(r'"torch>=([\d.]+)', pyproject)
    if found is None:
        raise ValueError("pyproject.toml has no requirement `torch>=...`")
    return found[1] if found[1].count(".") > 1 else f"{found[1]}.0"


def constraints(text: str) -> str:
    """Return constraints.txt without the packages whose versions a request chooses."""
    names = "|".join(_CHOSEN)
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(rf"({names})\b", line))
