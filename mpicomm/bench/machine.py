"""The environment of a measurement: machine, memory and page sizes, versions, date, command."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpicomm import mpi
from mpicomm.errors import MPINotFoundError

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def described(what: str) -> dict[str, Any]:
    """Return the header of a results file.

    Args:
        what: The measured quantity and its unit.
    """
    return {
        "command": shlex.join(["mpicomm", *sys.argv[1:]]),
        "what": what,
        "date": time.strftime("%Y-%m-%d"),
        "machine": of_this_host(),
        "versions": versions(),
    }


def write(found: Mapping[str, Any], path: Path) -> None:
    """Write a results file.

    Raises:
        OSError: If the file cannot be written.
    """
    path.write_text(json.dumps(found, indent=1) + "\n")


def of_this_host() -> dict[str, Any]:
    """Return the properties of this host."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory, GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "page, KiB": os.sysconf("SC_PAGE_SIZE") // 1024,
        "transparent huge pages": _chosen(_HUGE_PAGES),
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "not set"),
    }


def versions() -> dict[str, str]:
    """Return the versions of the loaded software, with the MPI library if there is one."""
    found = {}
    with contextlib.suppress(MPINotFoundError):
        library = mpi.library()
        found[library.vendor] = library.version
    found |= {name: importlib.metadata.version(name) for name in ("mpi4py", "torch")}
    return {**found, "Python": platform.python_version()}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _chosen(path: Path) -> str:
    """Return the selected value, in brackets in the kernel's file, or `unknown`."""
    text = path.read_text() if path.exists() else ""
    return text.partition("[")[2].partition("]")[0] or "unknown"
