"""A small virtual environment with the packages of another one, so that a test can copy it within a second."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

from tests.launching import ROOT


def make(directory: Path, python: Path) -> Path:
    """Make an environment, and return its Python.

    Args:
        python: The Python of the environment whose packages and MPI library it uses.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", directory], check=True)
    original = python.parent.parent
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(original)}))
    own_packages = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
    (own_packages / "original.pth").write_text(f"{packages}\n{ROOT}\n")
    for path in (original / "lib").iterdir():  # mpi4py loads the MPI library of sys.prefix
        if not (directory / "lib" / path.name).exists():
            (directory / "lib" / path.name).symlink_to(path)
    return directory / "bin" / "python"
