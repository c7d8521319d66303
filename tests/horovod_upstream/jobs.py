"""Starts the ranks, repeatedly until every test of Horovod's file has a verdict."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tests.conformance import jobs
from tests.conformance.journal import Journal
from tests.horovod_upstream.plugin import LABEL
from tests.horovod_upstream.results import Run
from tests.launching import run_ranks

_JOB_LIMIT = 1800.0  # seconds for all tests of a job
# Without the plugins of this checkout, such as pytest-mpi, which skip tests under mpirun.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "MPICOMM_HANG_SECONDS": "1000"}


def run(size: int, file: Path, *, limit: float, pattern: str = "", shows: bool = False) -> Run:
    """Run the tests of a file on `size` ranks.

    Args:
        limit: The time limit of a test in seconds.
        pattern: Run the tests whose names contain this text.
        shows: Show the output of the ranks.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="horovod-tests-") as scratch:
        journal = Journal(Path(scratch, "journal"))
        command = [
            "-m",
            "mpicomm.horovod",
            "-m",
            "pytest",
            str(file),
            "-p",
            "tests.horovod_upstream.plugin",
            "-s",
            "-q",
        ]
        command += ["-p", "no:cacheprovider", "-k", pattern, "--rootdir", str(file.parent)]
        command += ["--journal", str(journal.path), "--limit", str(limit)]
        jobs.until_finished(journal, lambda: _start(size, command), shows=shows)
        return Run(journal.verdicts(LABEL), round(time.monotonic() - start, 1))


def _start(size: int, command: list[str]) -> str:
    """Run a job, and return its output; the verdicts are in the journal, whatever its exit status."""
    try:
        outcome = run_ranks(size, command, env=_ENVIRONMENT, timeout=_JOB_LIMIT)
    except AssertionError as error:  # the job was killed, or left processes behind
        return str(error)
    return outcome.stdout + outcome.stderr
