"""Starts the ranks, again and again until every test has a verdict, and reads what they found."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mpicomm import mpi
from tests.conformance import verdicts
from tests.conformance.journal import Journal
from tests.conformance.verdicts import Verdict
from tests.launching import run_ranks

_JOB_LIMIT = 900.0  # seconds for all the tests of a job

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",  # some reasons show sets; all ranks are to say the same
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
}
"""The variables that the ranks need."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What came of the tests under some labels."""

    by_label: dict[str, dict[str, Verdict]]
    seconds: float


def run(
    size: int,
    labels: Sequence[str],
    *,
    of_torch: bool = False,
    limit: float = 60,
    pattern: str = "",
    sample: bool = False,
    shows: bool = False,
) -> Found:
    """Run PyTorch's tests on `size` ranks.

    Args:
        labels: The names of back ends under which to run them.
        of_torch: Run torch's own back ends, for comparison.
        limit: Seconds that a test may take.
        pattern: Run the tests whose names contain this.
        sample: Run the tests of `sample.NAMES` only.
        shows: Show what the ranks print.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        journal = Journal(Path(scratch, "journal"))
        options = ["--journal", str(journal.path), "--scratch", scratch, "--limit", str(limit), "--pattern", pattern]
        flags = [*["--of-torch"] * of_torch, *["--sample"] * sample]
        command = ["-m", "tests.conformance.ranks", *options, *flags, *labels]
        until_finished(journal, lambda: _start(size, command), shows=shows)
        return Found({label: journal.verdicts(label) for label in labels}, round(time.monotonic() - start, 1))


def until_finished(journal: Journal, start: Callable[[], str], *, shows: bool = False) -> None:
    """Start a job again and again until its journal is finished; the test in which a job ended has failed.

    Args:
        start: Runs the job, which leaves out the tests in the journal, and returns what it printed.
        shows: Show what the job printed, also where it finished.

    Raises:
        RuntimeError: If a job ends before its first test or after its last.
    """
    while not journal.is_finished():
        before = journal.last()
        output = start()
        if shows or not journal.is_finished():
            sys.stderr.write(output)
        if not journal.is_finished():
            _blame(journal, before, output)


def _start(size: int, command: list[str]) -> str:
    """Run a job, and return what it printed.

    How it ends is not asked: MPI is left as it is where a test has abandoned a call, as tests of timeouts do, and the
    launcher calls that a failure.
    """
    try:
        outcome = run_ranks(size, command, env=ENVIRONMENT, timeout=_JOB_LIMIT, mpiexec=mpi.library().mpiexec)
    except AssertionError as error:  # it was killed, or left processes behind
        return str(error)
    return outcome.stderr


def _blame(journal: Journal, before: tuple[str, str, bool] | None, output: str) -> None:
    """Write down as failed the test in which a job ended.

    Raises:
        RuntimeError: If it ended before or after the tests.
    """
    last = journal.last()
    if last is None or last == before:
        raise RuntimeError("the ranks do not come to the tests, or not beyond them; see what they print")
    label, name, has_verdict = last
    if not has_verdict:
        how = "took too long" if "Timeout (" in output else "ended the job"
        journal.end(label, name, Verdict(verdicts.FAIL, how))
