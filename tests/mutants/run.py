"""Runs tests in a copy of the checkout, with and without a fault."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path

from tests.launching import OTHER_MPI_ENV, ROOT, run_within
from tests.mutants import syntax
from tests.mutants.mutant import Mutant

_LONGEST = 600.0  # seconds for tests without a fault
_AT_LEAST, _FACTOR = 30.0, 4.0  # the time limit with a fault, in seconds and as a multiple of the time without it
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "mpicomm-dumps")
# Lines of pytest's summary, also of ranks other than 0, and of a rank that fails while others wait (tests/verdict.py).
_FAILED = re.compile(r"(?:FAILED|ERROR) (tests/\S+\.py(?:::\S+)?)|(tests/\S+) failed here while others wait")
_COLORS = re.compile(r"\x1b\[[\d;]*m")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a mutant."""

    kind: str
    """`found`, `missed`, `equivalent`, or `invalid` if the tests give no information about the fault."""

    by: str
    """The first test that failed, or the reason for another outcome."""

    seconds: float = 0.0


class Copy:
    """A copy of the checkout, in which faults are applied and removed."""

    def __init__(self, directory: Path) -> None:
        """Copy the files that the tests need to a new directory."""
        self._root = directory
        shutil.copytree(ROOT, self._root, symlinks=True, ignore=LEFT_OUT)
        self._package = read_sources(self._root)
        self._seconds: dict[tuple[str, int], float | None] = {}

    def run(self, mutant: Mutant) -> Verdict:
        if mutant.equivalent:
            return Verdict("equivalent", mutant.equivalent)
        try:
            faulty = mutant.applied_to(self._package)
        except ValueError as error:
            return Verdict("invalid", str(error))
        usual = self._usual_seconds(mutant)
        if usual is None:
            return Verdict("invalid", f"the tests do not pass without the fault: {mutant.tests}")
        source = faulty.path.read_text()
        write_module(faulty.path, faulty.source)
        try:
            return self._verdict(mutant, max(_AT_LEAST, _FACTOR * usual))
        finally:
            write_module(faulty.path, source)

    def _verdict(self, mutant: Mutant, limit: float) -> Verdict:
        outcome = run_within(limit, self._command(mutant), env=self._environment(), cwd=self._root)
        output = _COLORS.sub("", outcome.stdout + outcome.stderr)
        if "during collection" in output:
            return Verdict("invalid", f"the tests cannot be imported: {mutant.tests}", outcome.seconds)
        if found := _FAILED.search(output):
            return Verdict("found", found[1] or found[2], outcome.seconds)
        if outcome.status is None:
            return Verdict("found", f"time limit of {limit:.0f} s: {mutant.tests}", outcome.seconds)
        if outcome.status == 0:
            return Verdict("missed", mutant.tests, outcome.seconds)
        if outcome.status < 0 or outcome.status > 128:
            return Verdict("found", f"crash, status {outcome.status}: {mutant.tests}", outcome.seconds)
        return Verdict("invalid", f"status {outcome.status}, no failed test: {outcome.stdout[-500:]}", outcome.seconds)

    def _usual_seconds(self, mutant: Mutant) -> float | None:
        """Return the seconds of a mutant's tests without the fault; None if they do not pass."""
        key = mutant.tests, mutant.ranks
        if key not in self._seconds:
            outcome = run_within(_LONGEST, self._command(mutant), env=self._environment(), cwd=self._root)
            self._seconds[key] = outcome.seconds if outcome.status == 0 else None
        return self._seconds[key]

    def _command(self, mutant: Mutant) -> list[str]:
        launcher = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(mutant.ranks)] if mutant.ranks else []
        options = ["-q", "-x", "-rfE", "--no-header", *(["--with-mpi"] if mutant.ranks else [])]
        return [*launcher, sys.executable, "-m", "pytest", *options, *shlex.split(mutant.tests)]

    def _environment(self) -> dict[str, str]:
        other = {"OTHER_MPI_ENV": str(Path(OTHER_MPI_ENV).absolute())} if OTHER_MPI_ENV else {}
        return {"PYTHONPATH": str(self._root), **other}


def read_sources(root: Path) -> list[syntax.Module]:
    """Read the modules of a checkout in which mutants are."""
    return [module for folder in ("mpicomm", "benchmarks") for module in syntax.read_package(root / folder)]


def write_module(path: Path, source: str) -> None:
    """Replace a module and remove its bytecode: Python takes it for current if the size and the second are the same."""
    path.write_text(source)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
