"""A pytest plugin for tests that run on every rank: a failure on one rank fails the test on all, and nothing hangs.

After the set-up and after the body of a test marked `mpi`, the ranks exchange one flag each. A rank that failed waits
a few seconds for the others. If they do not arrive, they are blocked in a collective that this rank has left; the rank
then prints its own error and ends the job. A hang without a failed rank ends at `faulthandler_timeout` in
pyproject.toml, with the stacks of every rank.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
import zlib
from array import array
from collections.abc import Generator
from typing import Any

import pytest

from mpicomm import mpi
from tests.time_limits import scaled

WAIT_LIMIT = 5.0  # seconds for which a failed rank waits for the others, scaled
PASSED_HERE = "passed here, but failed"


class CollectiveVerdict:
    """Fails a test on all ranks if it fails on one."""

    def __init__(self, config: pytest.Config) -> None:
        # Dup is collective: every rank calls it here, at the start of its session, where it cannot hang.
        self.comm = mpi.job_comm().Dup()
        self.capture = config.pluginmanager.getplugin("capturemanager")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Agree on whether the set-up of a test succeeded."""
        return (yield from self._checked(item, "set-up"))

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """Agree on whether a test passed."""
        return (yield from self._checked(pyfuncitem, "test"))

    def _checked(self, item: pytest.Item, what: str) -> Generator[None, Any, Any]:
        if not item.get_closest_marker("mpi"):
            return (yield)
        error: BaseException | None = None
        result = None
        try:
            result = yield
        except BaseException as caught:  # noqa: BLE001  pytest's own outcomes are not Exceptions
            error = caught
        failed = self._failed_ranks(item.nodeid, error)
        if error is not None:
            raise error
        if failed:
            pytest.fail(f"the {what} {PASSED_HERE} on ranks {failed}", pytrace=False)
        return result

    def _failed_ranks(self, nodeid: str, error: BaseException | None) -> list[int]:
        has_failed = error is not None and not isinstance(error, pytest.skip.Exception)
        here = zlib.crc32(nodeid.encode())
        flags = array("q", [0, 0] * self.comm.size)  # for each rank: whether it failed, and the hash of its test
        request = self.comm.Iallgather(array("q", [has_failed, here]), flags)
        deadline = time.monotonic() + scaled(WAIT_LIMIT)
        while not request.Test():
            if has_failed and time.monotonic() > deadline:
                self._abort(nodeid, error)
            time.sleep(0.001)
        if any(test != here for test in flags[1::2]):
            pytest.exit(f"rank {self.comm.rank} is in {nodeid}, others are in another test: the order must not vary")
        return [rank for rank, flag in enumerate(flags[0::2]) if flag]

    def _abort(self, nodeid: str, error: BaseException | None) -> None:
        text = "".join(traceback.format_exception(error))
        with self.capture.global_and_fixture_disabled():
            os.write(2, f"\n[rank {self.comm.rank}] {nodeid} failed here while others wait:\n{text}".encode())
            time.sleep(0.2)  # launchers forward output by pipes
            mpi.job_comm().Abort(1)


class QuietRank:
    """Withholds the output of a rank other than 0, and prints it at the end if a test failed on that rank."""

    def __init__(self, config: pytest.Config, rank: int) -> None:
        self.rank = rank
        self.has_failed = False
        self.held = io.StringIO()
        reporter = config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = self.held

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record whether a test failed on this rank, and not only on another rank."""
        self.has_failed |= report.failed and PASSED_HERE not in report.longreprtext

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Print the withheld output, if a test failed on this rank."""
        if self.has_failed:
            lines = self.held.getvalue().splitlines()
            sys.stderr.write("".join(f"[rank {self.rank}] {line}\n" for line in lines))
