"""Starts the ranks, repeatedly until every test has a verdict, and reads the verdicts."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mpicomm import mpi
from tests.conformance import verdicts
from tests.conformance.journal import Journal
from tests.conformance.verdicts import Verdict
from tests.launching import run_ranks

JOB_LIMIT_SECONDS = 900.0  # for all tests of a job

ENVIRONMENT_ON_DEVICES = {
    "PYTHONHASHSEED": "0",  # some reasons contain sets, which all ranks must print in the same order
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
}
"""The variables that the ranks need."""

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", **ENVIRONMENT_ON_DEVICES}
"""The variables that the ranks need for tests of CPU tensors."""


def parser(prog: str, description: str, limit: float) -> argparse.ArgumentParser:
    """Return a parser with the options that all programs have.

    Args:
        limit: The default time limit of a test in seconds.
    """
    made = argparse.ArgumentParser(prog=f"python -m {prog}", description=description.splitlines()[0])
    made.add_argument("--write", action="store_true", help="write the results and the page")
    made.add_argument("--limit", type=float, default=limit, metavar="S", help="time limit of a test (%(default)s s)")
    made.add_argument("-k", default="", metavar="TEXT", help="run the tests whose names contain TEXT")
    made.add_argument("-s", action="store_true", help="show the output of the ranks")
    return made


def run(
    size: int,
    labels: Sequence[str],
    *,
    device: str = "cpu",
    of_torch: bool = False,
    limit: float = 60,
    total: float = math.inf,
    pattern: str = "",
    sample: bool = False,
    shows: bool = False,
) -> tuple[dict[str, dict[str, Verdict]], float]:
    """Run PyTorch's tests on `size` ranks, and return the verdicts by label and name, and the seconds.

    Args:
        labels: The backend names under which to run them.
        device: The device of the tensors, `cpu` or `accelerator`.
        of_torch: Run torch's own backends, for comparison.
        limit: The time limit of a test in seconds.
        total: The seconds after which no further test starts; the others get no verdict.
        pattern: Run the tests whose names contain this text.
        sample: Run only the tests of `sample.NAMES`.
        shows: Show the output of the ranks.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        journal = Journal(Path(scratch, "journal"))
        options = ["--journal", str(journal.path), "--scratch", scratch, "--limit", str(limit), "--pattern", pattern]
        options += ["--device", device]
        environ = ENVIRONMENT if device == "cpu" else ENVIRONMENT_ON_DEVICES
        flags = [*["--of-torch"] * of_torch, *["--sample"] * sample]
        command = ["-m", "tests.conformance.ranks", *options, *flags, *labels]

        def start_job() -> str:
            return start(size, [*command, "--total", str(began + total - time.monotonic())], environ)

        until_finished(journal, start_job, shows=shows)
        return {label: journal.verdicts(label) for label in labels}, round(time.monotonic() - began, 1)


def until_finished(journal: Journal, start: Callable[[], str], *, shows: bool = False) -> None:
    """Start a job repeatedly until its journal is finished; the test in which a job ended has failed.

    Args:
        start: Runs the job, which skips the tests in the journal, and returns its output.
        shows: Show the output of the job even if it finished.

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


def start(size: int, command: list[str], env: Mapping[str, str] = ENVIRONMENT, limit: float = JOB_LIMIT_SECONDS) -> str:
    """Run Python on `size` ranks, and return its output.

    The exit status is ignored: MPI is not finalised after a test that abandons a call, as tests of timeouts do, and the
    launcher reports that as a failure.
    """
    try:
        outcome = run_ranks(size, command, env=env, timeout=limit, mpiexec=mpi.library().mpiexec)
    except AssertionError as error:  # the job was killed, or left processes behind
        return str(error)
    return outcome.stdout + outcome.stderr


def _blame(journal: Journal, before: tuple[str, str, bool] | None, output: str) -> None:
    """Record the test in which a job ended as failed.

    Raises:
        RuntimeError: If it ended before or after the tests.
    """
    last = journal.last()
    if last is None or last == before:
        raise RuntimeError("the job ended before its first test or after its last; see its output")
    label, name, has_verdict = last
    if not has_verdict:
        how = "timed out" if "Timeout (" in output else "ended the job"
        journal.end(label, name, Verdict(verdicts.FAIL, how))
