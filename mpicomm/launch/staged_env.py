"""The copy of a Python environment on local storage of every node, and the request that runs its ranks from there."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from mpicomm.errors import LaunchError
from mpicomm.launch.request import Request

_MARKS = ("pyvenv.cfg", "conda-meta")  # of a virtual environment (PEP 405) and of a conda environment


@dataclasses.dataclass(frozen=True)
class StagedEnv:
    """A Python environment and its copy.

    Python finds its environment from the path by which it is started, so that the Python of the copy uses the packages
    of the copy. The scripts in `bin` name the original Python, so they are of no use there.
    """

    prefix: str
    """The directory of the environment."""

    copy: str
    """The directory of the copy, at the same path on every node."""

    @classmethod
    def new(cls, prefix: str, directory: str, token: str) -> StagedEnv:
        """Return an environment with a copy of its own below a directory of the nodes.

        Args:
            token: Distinguishes the copies.

        Raises:
            LaunchError: If the prefix is not a virtual or conda environment but a whole installation, such as /usr.
        """
        if not any(Path(prefix, mark).exists() for mark in _MARKS):
            raise LaunchError(
                f"--stage-env copies a virtual or conda environment, but this Python is installed in {prefix}.\n"
                f"Create an environment with mpicomm and torch (python -m venv DIR), and start its mpicomm run."
            )
        return cls(prefix, str(Path(directory, f"mpicomm-env-{token}")))

    def staged(self, request: Request, python: str) -> Request:
        """Return the request with the Python of the copy.

        Args:
            python: The Python of the environment.

        Raises:
            LaunchError: If this Python does not run the program, or is not in the environment.
        """
        if request.program[0] != python or not Path(python).is_relative_to(self.prefix):
            raise LaunchError(
                f"--stage-env requires a program that {self.prefix} runs with its Python, "
                f"got {shlex.join(request.program)}.\n"
                f"Pass a script (train.py) or -m MODULE, or remove --stage-env."
            )
        own_python = str(Path(self.copy, Path(python).relative_to(self.prefix)))
        return dataclasses.replace(request, program=(own_python, *request.program[1:]), python=own_python)
