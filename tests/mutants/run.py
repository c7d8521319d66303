"""Runs tests in a copy of the checkout, with and without a fault."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from tests import time_limits
from tests.launching import OTHER_MPI_ENV, ROOT, run_within
from tests.mutants import marks, syntax
from tests.mutants.mutant import Mutant

JOB = "a job"
"""The name of the mark of tests that start jobs."""

_LONGEST_RUN = 3000.0  # seconds for some files of tests
_LONGEST = 600.0  # seconds for tests without a fault
_AT_LEAST, _FACTOR = 30.0, 4.0  # the limit with a fault: in seconds, and as a multiple of the time without it; scaled
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "mpicomm-dumps")
# Lines of pytest's summary, also of ranks other than 0, and of a rank that fails while others wait (pytest_plugin.py).
_FAILED = re.compile(
    r"(?:FAILED|ERROR) (tests/\S+\.py(?:::\S+)?)|of (tests/\S+) (?:failed|ended) here while others wait"
)
_COLORS = re.compile(r"\x1b\[[\d;]*m")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a mutant."""

    kind: str
    """`found`, `missed`, `equivalent`, or `invalid` if the tests give no information about the fault."""

    by: str
    """The first test that failed, or the reason for another outcome."""

    seconds: float = 0.0
    is_by_limit: bool = False
    """Whether the tests have only exceeded their limit."""


@dataclasses.dataclass
class Test:
    """A test that has run."""

    name: str
    has_failed: bool = False
    has_ended: bool = False
    """False if it was killed at the limit of the run."""

    seconds: float = 0.0
    fixtures: dict[str, float] = dataclasses.field(default_factory=dict)
    """The fixtures that it shares with other tests, and the duration of each in seconds."""

    @property
    def total_seconds(self) -> float:
        """The duration, as if no other test used the fixtures."""
        return self.seconds + sum(self.fixtures.values())


class Copy:
    """A copy of the checkout, in which faults are applied and removed."""

    def __init__(self, directory: Path) -> None:
        """Copy the files that the tests need to a new directory."""
        self._root = directory
        shutil.copytree(ROOT, self._root, symlinks=True, ignore=LEFT_OUT)
        self._package = read_sources(self._root)
        self._marks: list[str] = []
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
        limit = time_limits.scaled(max(_AT_LEAST, _FACTOR * usual))
        with replaced(faulty.path, faulty.source):
            verdict = self._verdict(mutant, limit)
        if verdict.is_by_limit and not self._passes_within(mutant, limit / 2):
            return Verdict("invalid", f"the machine is too busy: {verdict.by}", verdict.seconds)
        return verdict

    def fault(self, mutant: Mutant) -> AbstractContextManager[None]:
        """Apply a fault in a `with` block.

        Raises:
            ValueError: If the code to replace does not occur exactly once.
        """
        faulty = mutant.applied_to(self._package)
        return replaced(faulty.path, faulty.source)

    def outcomes(self, arguments: list[str], limit: float = _LONGEST_RUN) -> list[Test]:
        """Run pytest, and return the tests that began within the limit, after which it is killed."""
        file = self._root.with_name(f"{self._root.name}-outcomes")  # a test may leave no new file in its directory
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.marks", *arguments]
        run_within(limit, command, env=self._environment() | {marks.RESULTS: str(file)}, cwd=self._root)
        tests: dict[str, Test] = {}
        for line in file.read_text().splitlines() if file.exists() else []:
            name, phase, outcome, seconds, shared = json.loads(line)
            test = tests.setdefault(name, Test(name))
            test.has_failed |= outcome == "failed"
            test.fixtures |= shared
            test.seconds += seconds if phase == "call" else 0.0
            test.has_ended |= phase == "teardown"
        return list(tests.values())

    def add_marks(self, mutants: list[Mutant]) -> None:
        """Let each test record which of the mutants it executes, and whether it starts a job; see `hits`."""
        package = [*self._package, *syntax.read_package(self._root / "tests")]
        positions = [(JOB, syntax.statement(package, "launching.Job.__init__", "self._mark = uuid.uuid4().hex", ""))]
        positions += [
            (mutant.name, syntax.statement(package, mutant.place, mutant.old, mutant.new)) for mutant in mutants
        ]
        for name, position in sorted(positions, key=lambda item: item[1] or (), reverse=True):
            if position is not None:  # from the last line of a file to the first
                path, line, column = position
                lines = path.read_text().split("\n")
                call = f'__import__("tests.mutants.marks").mutants.marks.hit({len(self._marks)})'
                lines.insert(line - 1, " " * column + call)
                self._marks.append(name)
                _write_module(path, "\n".join(lines))

    def hits(self, test: Test) -> set[str]:
        """Return the names of the mutants that a test has executed, and JOB if it has started a job."""
        folders = [self._root / marks.folder_of(name).relative_to(ROOT) for name in (test.name, *test.fixtures)]
        return {self._marks[int(path.name)] for folder in folders for path in folder.glob("*")}

    def _verdict(self, mutant: Mutant, limit: float) -> Verdict:
        outcome = run_within(limit, self._command(mutant), env=self._environment(), cwd=self._root)
        output = _COLORS.sub("", outcome.stdout + outcome.stderr)
        if "during collection" in output:
            return Verdict("invalid", f"the tests cannot be imported: {mutant.tests}", outcome.seconds)
        if found := _FAILED.search(output):
            return Verdict("found", found[1] or found[2], outcome.seconds)
        if outcome.status is None:
            return Verdict("found", f"time limit of {limit:.0f} s: {mutant.tests}", outcome.seconds, is_by_limit=True)
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

    def _passes_within(self, mutant: Mutant, seconds: float) -> bool:
        """Return whether a mutant's tests pass without the fault, in that time."""
        return run_within(seconds, self._command(mutant), env=self._environment(), cwd=self._root).status == 0

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


@contextlib.contextmanager
def replaced(path: Path, source: str) -> Iterator[None]:
    """Replace the content of a module, or of a source in C, in a `with` block."""
    before = path.read_text()
    try:
        with _built(path) if path.suffix == ".c" else contextlib.nullcontext():
            _write_module(path, source)
            if path.suffix == ".c":
                _build(path)
            yield
    finally:
        _write_module(path, before)


@contextlib.contextmanager
def _built(path: Path) -> Iterator[None]:
    """Restore the extension module of a source in C at the end of a `with` block."""
    built = path.with_name("hot_path.abi3.so")
    before = built.read_bytes()
    try:
        yield
    finally:
        built.unlink()
        built.write_bytes(before)


def _build(path: Path) -> None:
    """Build the extension module of the checkout with this source."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    outcome = run_within(_LONGEST, command, cwd=path.parents[2])
    if outcome.status != 0:
        raise ValueError(f"{path.name} cannot be built: {outcome.stderr[-500:]}")


def _write_module(path: Path, source: str) -> None:
    """Replace a module and remove its bytecode: Python takes it for current if the size and the second are the same."""
    path.write_text(source)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
