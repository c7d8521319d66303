"""Writes the results of programs that run under mpirun to docs/results."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from mpicomm import job_info, mpi
from mpicomm.cli.argument_types import count
from mpicomm.reports import result_files

_DIRECTORY = Path(__file__).resolve().parents[1] / "docs" / "results"


def options(program: str, description: str | None, rounds: int) -> argparse.Namespace:
    """Return the options --json and --rounds of a program."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    parser.add_argument("--rounds", metavar="R", type=count, default=rounds, help="rounds (default: %(default)s)")
    return parser.parse_args()


def write(name: str, size: int, what: str, path: Path | None = None, /, **figures: Any) -> None:
    """Write a file, and print it.

    Args:
        name: The start of the file name; the name of the MPI library is appended.
        size: The number of ranks.
        what: The measured quantity and its unit.
        path: The file; by default one in docs/results.
        figures: The results, and other properties of the measurement.
    """
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "run the program with python -m"
    program = spec.name.removesuffix(".__main__")
    head = job_info.description(what, shlex.join(["mpirun", "-n", str(size), "python", "-m", program, *sys.argv[1:]]))
    path = path or _DIRECTORY / f"{name}-{mpi_name(mpi.library().vendor)}.json"
    result_files.write(path, {**head, "ranks": size, **figures})
    sys.stdout.write(path.read_text())


def mpi_name(vendor: str) -> str:
    """Return the name of an MPI library in file names, such as openmpi."""
    return re.sub("[^a-z]", "", vendor.lower())
