"""A pytest plugin: the ranks of `mpirun -n 4 pytest --with-mpi` fail a test together, and no rank waits forever.

pytest loads it where mpicomm is installed. Loading it imports neither torch nor MPI, and changes nothing outside of a
job that an MPI launcher has started. `--with-mpi` and the marker `mpi` are those of the package pytest-mpi.

After the collection, and after the set-up, body and tear-down of a test marked `mpi`, the ranks exchange whether it
failed. A test that failed on one rank fails on all; one that a fixture skips on one rank is skipped on all. A rank that
failed waits some seconds for the others; if they do not arrive, they are blocked in an operation that this rank has
left: it prints its error and aborts the job. Rank 0 prints pytest's report, the other ranks only if a test failed on
them.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
import zlib
from array import array
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from mpicomm.errors import MpicommError
from mpicomm.launch import detect

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_WAIT_SECONDS = 10.0  # that a failed rank waits for the others: they may still run the test
_PAUSE_SECONDS = 0.001  # between two polls, which would otherwise take the cores from the other ranks
_PRINTING_SECONDS = 0.2  # launchers forward output by pipes; output in flight at the abort may be lost
_PASSED_HERE = "passed here, but failed"
_PASSED, _SKIPPED, _FAILED = range(3)

_launch = detect.detect(os.environ)

_is_in_job = _launch.kind == "mpi" and bool(_launch.claims)

if _is_in_job:
    # What is written while pytest captures stderr is lost if the job is aborted. This plugin is loaded before that.
    sys.__stderr__ = os.fdopen(os.dup(2), "w")  # type: ignore[misc]


def runs_on_ranks(config: pytest.Config) -> bool:
    """Return whether this session is one of `mpirun -n N pytest --with-mpi`."""
    return _is_in_job and bool(config.getoption("--with-mpi", False))


@pytest.hookimpl(trylast=True)  # after the terminal reporter is registered
def pytest_configure(config: pytest.Config) -> None:
    """Initialise MPI (collective), and register the plugins of a rank.

    Raises:
        pytest.UsageError: If MPI cannot be initialised.
    """
    if not runs_on_ranks(config):
        return
    from mpicomm import mpi

    try:
        comm = mpi.initialize(_launch.local_size)
    except MpicommError as error:
        raise pytest.UsageError(str(error)) from error
    # Dup is collective: every rank calls it here, at the start of its session, where it cannot hang.
    config.pluginmanager.register(RanksInStep(comm.Dup()), "mpicomm-ranks-in-step")
    if comm.rank != 0:
        config.pluginmanager.register(QuietRank(config, comm.rank), "mpicomm-quiet-rank")


class RanksInStep:
    """Fails a test on all ranks if it fails on one."""

    def __init__(self, comm: Intracomm) -> None:
        """Use a communicator of all ranks, which no other code uses."""
        self._comm = comm

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Check that the collection succeeded on all ranks, with the same tests in the same order (collective)."""
        tests = zlib.crc32("\n".join(item.nodeid for item in session.items).encode())
        outcome = _FAILED if session.testsfailed else _PASSED
        outcomes, of_ranks = self._exchange(outcome, tests, "the collection", None)
        if _FAILED in outcomes:
            pytest.exit(f"the collection failed on ranks {_ranks_with(_FAILED, outcomes)}", returncode=2)
        if len(set(of_ranks)) > 1:
            pytest.exit(
                "the ranks have collected different tests.\nCollect the same tests in the same order on all ranks.",
                returncode=2,
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Agree on whether the set-up of a test succeeded (collective)."""
        return (yield from self._checked(item, "set-up"))

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """Agree on whether a test passed (collective)."""
        return (yield from self._checked(pyfuncitem, "test"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Agree on whether the tear-down of a test succeeded (collective)."""
        return (yield from self._checked(item, "tear-down"))

    def _checked(self, item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
        if not item.get_closest_marker("mpi"):
            return (yield)
        error: BaseException | None = None
        result = None
        try:
            result = yield
        except BaseException as caught:  # noqa: BLE001  pytest's own outcomes are not Exceptions
            error = caught
        outcome = _PASSED if error is None else _SKIPPED if isinstance(error, pytest.skip.Exception) else _FAILED
        test = f"the {phase} of {item.nodeid}"
        outcomes, tests = self._exchange(outcome, zlib.crc32(test.encode()), test, error)
        if len(set(tests)) > 1:
            pytest.exit(f"rank {self._comm.rank} has finished {test}, other ranks another one", returncode=2)
        if error is not None:
            raise error
        if _FAILED in outcomes:
            pytest.fail(f"the {phase} {_PASSED_HERE} on ranks {_ranks_with(_FAILED, outcomes)}", pytrace=False)
        if phase == "set-up" and _SKIPPED in outcomes:  # those ranks do not run the test
            pytest.skip(f"the set-up skipped the test on ranks {_ranks_with(_SKIPPED, outcomes)}")
        return result

    def _exchange(
        self, outcome: int, subject_hash: int, subject: str, error: BaseException | None
    ) -> tuple[list[int], list[int]]:
        """Return the outcomes, and what they are of, on all ranks (collective).

        A rank on which it failed waits for the others for a limited time, and then aborts the job.
        """
        of_ranks = array("q", [0, 0] * self._comm.size)
        request = self._comm.Iallgather(array("q", [outcome, subject_hash]), of_ranks)
        deadline = time.monotonic() + _WAIT_SECONDS
        while not request.Test():
            if outcome == _FAILED and time.monotonic() > deadline:
                self._abort(subject, error)
            time.sleep(_PAUSE_SECONDS)
        return of_ranks[0::2].tolist(), of_ranks[1::2].tolist()

    def _abort(self, subject: str, error: BaseException | None) -> None:
        reason = "" if error is None else "".join(traceback.format_exception(error))
        assert sys.__stderr__ is not None  # `os.fdopen` above
        sys.__stderr__.write(f"\n[rank {self._comm.rank}] {subject} failed here while others wait:\n{reason}")
        sys.__stderr__.flush()
        time.sleep(_PRINTING_SECONDS)
        self._comm.Abort(1)


def _ranks_with(outcome: int, outcomes: Sequence[int]) -> list[int]:
    return [rank for rank, of_rank in enumerate(outcomes) if of_rank == outcome]


class QuietRank:
    """Withholds pytest's report of a rank other than 0, and prints it at the end if a test failed on that rank."""

    def __init__(self, config: pytest.Config, rank: int) -> None:
        """Redirect the terminal reporter."""
        self._rank = rank
        self._has_failed = False
        self._report = io.StringIO()
        config.pluginmanager.getplugin("terminalreporter")._tw._file = self._report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record whether a test failed on this rank, and not only on another rank."""
        self._has_failed |= report.failed and _PASSED_HERE not in report.longreprtext

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record whether this rank cannot import a file of tests."""
        self._has_failed |= report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Print the report, if a test failed on this rank."""
        if self._has_failed:
            sys.stderr.write("".join(f"[rank {self._rank}] {line}\n" for line in self._report.getvalue().splitlines()))
