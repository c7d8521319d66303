"""The parts of the suite: the marked tests, a sample of PyTorch's own, and examples, on two ranks."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.compat.environment import Environment
from tests.conformance import jobs, verdicts
from tests.conformance.journal import Journal
from tests.conformance.verdicts import FAIL, PASS, SKIP, Verdict
from tests.launching import ROOT, run_within

RANKS = 2
EXAMPLES = ("p2p", "collectives", "ddp", "trainer")
_LABELS = ("mpicomm", "mpi", "gloo")  # each enables tests of PyTorch that the others do not
_TEST_SECONDS, _EXAMPLE_SECONDS = 60, 240  # time limits of one test; a busy machine must not exceed them
_MARK = "each_torch"
JOURNAL = "COMPAT_JOURNAL"
"""The variable that names the journal of the marked tests."""
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # torch's wheels include CUDA; the suite tests only features of all machines


@dataclasses.dataclass(frozen=True)
class Part:
    """The results of the tests of a part."""

    passed: int
    skipped: int
    seconds: float
    failures: Mapping[str, str]
    """The reasons, by test."""

    @classmethod
    def of(cls, found: Mapping[str, Verdict], seconds: float) -> Part:
        """Return the part with the counts of verdicts."""
        counts = verdicts.count(found.values())
        failures = {name: verdict.reason for name, verdict in found.items() if verdict.outcome == FAIL}
        return cls(counts[PASS], counts[SKIP], round(seconds, 1), failures)

    @property
    def is_good(self) -> bool:
        """Whether a test passed and none failed."""
        return self.passed > 0 and not self.failures

    def __str__(self) -> str:
        counts = {"passed": self.passed, "failed": len(self.failures), "skipped": self.skipped}
        text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "no test"
        return f"{text} ({self.seconds:.0f} s)"


class Suite:
    """Runs the parts in an environment, within one time limit for all."""

    def __init__(self, environment: Environment, seconds: float) -> None:
        self._environment = environment
        self._end = time.monotonic() + seconds

    def run(self) -> Iterator[tuple[str, Part]]:
        """Run all parts, and yield their names and results."""
        with tempfile.TemporaryDirectory(prefix="compat-") as directory:
            yield from self._tests(Path(directory))
            yield from self._conformance(Path(directory))
            for name in EXAMPLES:
                yield f"example {name}", self._example(name, Path(directory))

    def _tests(self, directory: Path) -> Iterator[tuple[str, Part]]:
        """Run the marked tests in one job, or in several if a test ends the job."""
        journal = Journal(directory / "tests")
        command = [*pytest_command(_TEST_SECONDS), *marked_files()]
        failure = self._until_finished(journal, command, {JOURNAL: str(journal.path)})
        for part in journal.labels():
            yield part, Part.of(journal.verdicts(part), journal.seconds(part))
        if failure:
            yield "tests", Part(0, 0, 0.0, {"job": failure})

    def _conformance(self, directory: Path) -> Iterator[tuple[str, Part]]:
        """Run a sample of PyTorch's tests; a test passes if it passes under one backend name and fails under none."""
        journal = Journal(directory / "conformance")
        options = ["--journal", str(journal.path), "--scratch", str(directory), "--limit", str(_TEST_SECONDS)]
        command = ["-m", "tests.conformance.ranks", "--sample", *options, *_LABELS]
        failure = self._until_finished(journal, command, jobs.ENVIRONMENT)
        found = {label: journal.verdicts(label) for label in _LABELS}
        names = sorted({name for each in found.values() for name in each})
        of_tests = {name: verdicts.of_labels({k: v[name] for k, v in found.items() if name in v}) for name in names}
        if failure:
            of_tests["job"] = Verdict(FAIL, failure)
        yield "conformance", Part.of(of_tests, sum(journal.seconds(label) for label in _LABELS))

    def _example(self, name: str, directory: Path) -> Part:
        arguments = ["--dir", str(directory / "run")] if name == "trainer" else []
        start = time.monotonic()
        status, output = self._start(["-m", f"mpicomm.examples.{name}", *arguments], {}, _EXAMPLE_SECONDS)
        if status != 0:
            sys.stderr.write(output)
        reason = "" if status == 0 else "time limit" if status is None else f"exit status {status}"
        verdict = Verdict(PASS) if status == 0 else Verdict(FAIL, reason)
        return Part.of({name: verdict}, time.monotonic() - start)

    def _until_finished(self, journal: Journal, arguments: list[str], environ: Mapping[str, str]) -> str:
        """Run a job until its journal is finished, and return why it failed; show its output if a test fails."""
        outputs = []

        def start() -> str:
            if time.monotonic() > self._end:
                raise RuntimeError("the suite timed out")
            outputs.append(self._start(arguments, environ, self._end - time.monotonic())[1])
            return outputs[-1]

        try:
            jobs.until_finished(journal, start)
        except RuntimeError as error:
            return str(error)
        found = [verdict for label in journal.labels() for verdict in journal.verdicts(label).values()]
        if any(verdict.outcome == FAIL for verdict in found):
            sys.stderr.write(outputs[-1])
        return ""

    def _start(self, arguments: list[str], environ: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
        """Run Python on the ranks, and return its exit status (None at its time limit) and its output."""
        command = [self._environment.mpiexec, "-n", str(RANKS), self._environment.python, *arguments]
        variables = {**self._environment.environ(), **_NO_GPU, **environ}
        outcome = run_within(max(1.0, seconds), command, env=variables, cwd=ROOT)
        return outcome.status, outcome.stdout + outcome.stderr


def pytest_command(seconds: float) -> list[str]:
    """Return the Python arguments that run the marked tests, each with a time limit."""
    limits = ["-o", f"faulthandler_timeout={seconds}", "-o", "faulthandler_exit_on_timeout=true"]
    recording = ["-p", "tests.compat.plugin", "--continue-on-collection-errors"]
    return ["-m", "pytest", "--with-mpi", "--color=no", *limits, *recording]


def marked_files() -> list[str]:
    """Return the test modules with marked tests: other modules may need packages that the environment lacks."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if f"mark.{_MARK}(" in path.read_text()]
