"""Writes files of figures to docs/results, with the command, the date, the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from mpicomm import mpi

DIRECTORY = Path(__file__).resolve().parents[1] / "docs" / "results"


def write(name: str, size: int, module: str, machine: str = "", **figures: Any) -> None:
    """Write a file, and print it.

    Args:
        name: The start of the file name; the name of the MPI library is appended.
        size: The number of ranks.
        module: The Python module that was run under mpirun.
        machine: Text to append to the number of cores.
    """
    library = mpi.library()
    found = {
        "command": f"mpirun -n {size} python -m {module}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores{machine}",
        "versions": {
            library.vendor: library.version,
            "mpi4py": importlib.metadata.version("mpi4py"),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        "ranks": size,
        **figures,
    }
    text = json.dumps(found, indent=1) + "\n"
    (DIRECTORY / f"{name}-{re.sub('[^a-z]', '', library.vendor.lower())}.json").write_text(text)
    sys.stdout.write(text)
