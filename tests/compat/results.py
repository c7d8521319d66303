"""The result files docs/results/compat/*.json: one for each combination of versions."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpicomm.reports import result_files
from tests.compat.suite import Part
from tests.launching import ROOT

_DIRECTORY = ROOT / "docs" / "results" / "compat"
_OTHERS = ("mpi4py", "torch", "Python", "NumPy")


def write(facts: Mapping[str, Any], parts: Mapping[str, Part], command: str) -> Path:
    """Write a file, and return its path.

    Args:
        facts: The machine and the versions, as `facts.py` prints them.
        command: The command that was run.
    """
    found = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        **facts,
        "parts": {name: dataclasses.asdict(part) for name, part in parts.items()},
    }
    path = _DIRECTORY / f"{name_of(facts['versions'])}.json"
    result_files.write(path, found)
    return path


def read_all() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in _DIRECTORY.glob("*.json")]


def name_of(versions: Mapping[str, str]) -> str:
    """Return the file name for these versions."""
    mpi = mpi_of(versions)
    python = ".".join(versions["Python"].split(".")[:2])
    words = ["torch", versions["torch"].partition("+")[0], "python", python, *mpi]
    words += ["mpi4py", versions["mpi4py"], "numpy", versions["NumPy"]]
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")


def order(result: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the sort key of a result: torch, Python, MPI."""
    versions = result["versions"]
    numbers = [tuple(map(int, re.findall(r"\d+", versions[name]))) for name in ("torch", "Python")]
    return *numbers, *mpi_of(versions), versions["mpi4py"], versions["NumPy"]


def outcome(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table's result cell: the number of passed parts, and the failed tests of the other parts."""
    failed = [name for name, part in parts.items() if part["failures"] or not part["passed"]]
    counts = [
        f"{name} ({len(part['failures'])} of {len(part['failures']) + part['passed']})"
        for name, part in parts.items()
        if name in failed
    ]
    passed = sum(part["passed"] for part in parts.values())
    text = f"{len(parts) - len(failed)} of {len(parts)} parts, {passed:,} tests"
    return f"{text}; **failed: {', '.join(counts)}**" if counts else text


def mpi_of(versions: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and the version of the MPI library."""
    ((name, version),) = ((name, value) for name, value in versions.items() if name not in _OTHERS)
    return name, version
