"""Environments of the suite: .venv-compat/NAME, created with the standard library and pip."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.compat import request
from tests.compat.mpis import MPI, MPIS
from tests.compat.request import NEWEST, Request
from tests.launching import ROOT

_DIRECTORY = ROOT / ".venv-compat"
_SYSTEM_LIBRARIES = "/usr/lib/*-linux-gnu*"


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment with the versions of a request."""

    request: Request

    @property
    def path(self) -> Path:
        return _DIRECTORY / self.request.name

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    @property
    def mpiexec(self) -> str:
        return self._mpi.command("mpiexec", self.path)

    def environ(self) -> dict[str, str]:
        """Return the variables that a process in the environment needs."""
        path = f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        libraries = {"LD_LIBRARY_PATH": str(self.path / "lib")} if self._mpi.library else {}
        return {"PATH": path, "VIRTUAL_ENV": str(self.path), **self._mpi.environ, **libraries}

    def install(self) -> None:
        """Create the environment, or install the packages whose versions differ.

        Raises:
            subprocess.CalledProcessError: If pip fails.
        """
        if not self.path.exists():
            sys.stdout.write(f"Installing {self.path.relative_to(ROOT)} (minutes, and several GB)\n")
            sys.stdout.flush()
            subprocess.run([sys.executable, "-m", "venv", str(self.path)], check=True)
        self._link_library()
        extras = ",".join([*[self._mpi.extra] * bool(self._mpi.extra), "examples", "test-minimum"])
        self._pip(
            "--upgrade", "-e", f"{ROOT}[{extras}]", self.request.requirement("torch"), self.request.requirement("numpy")
        )
        self._install_mpi4py()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def facts(self) -> dict[str, Any]:
        """Return the machine and the versions that the environment loads."""
        command = [self.python, "-m", "tests.compat.facts"]
        found = subprocess.run(command, env=self._with_own(), cwd=ROOT, check=True, capture_output=True, text=True)
        return json.loads(found.stdout)

    @property
    def _mpi(self) -> MPI:
        return MPIS[self.request.mpi]

    def _install_mpi4py(self) -> None:
        """Reinstall mpi4py with the current MPI; its version may be lower than the package allows."""
        options = ["--force-reinstall", "--no-deps", self.request.requirement("mpi4py")]
        if self.request.builds_mpi4py:
            mpicc = self._mpi.command("mpicc", self.path)
            quickly = {"MPICC": mpicc, "CFLAGS": "-O0 -g0"}  # saves minutes compared with the flags of the Python build
            self._pip("--no-binary=mpi4py", *options, **quickly)
        else:
            self._pip("--only-binary=mpi4py", *options)

    def _pip(self, *arguments: str, **variables: str) -> None:
        """Run `pip install`, with constraints.txt for the packages whose versions are not chosen."""
        environ = self._with_own() | variables
        if self.request.torch == NEWEST:  # pip's configuration may limit the version
            environ["PIP_CONFIG_FILE"] = os.devnull
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(request.constraints((ROOT / "constraints.txt").read_text()))
            file.flush()
            # no cache: it would store the same gigabytes again, or a wheel that was compiled with another MPI
            command = [self.python, "-m", "pip", "install", "-qq", "--no-cache-dir", "-c", file.name, *arguments]
            subprocess.run(command, env=environ, check=True, cwd=ROOT)

    def _link_library(self) -> None:
        """Link the library to the name that wheels of mpi4py search for; Debian's MPICH has another file name."""
        link = self.path / "lib" / "libmpi.so.12"
        if self._mpi.library and not link.is_symlink():
            (found,) = Path("/").glob(f"{_SYSTEM_LIBRARIES[1:]}/{self._mpi.library}")
            link.symlink_to(found)

    def _with_own(self) -> dict[str, str]:
        return {**os.environ, **self.environ()}
