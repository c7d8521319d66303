"""A pytest plugin that runs the tests marked `each_torch`, and writes their verdicts into a journal.

Rank 0 writes each test's start and verdict under the name of its part. Tests that are already in the journal are
skipped, so a job can be restarted after a test has ended it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.compat.suite import JOURNAL
from tests.conformance import verdicts
from tests.conformance.journal import Journal
from tests.conformance.verdicts import FAIL, PASS, Verdict

UNREADABLE = "import of the tests"
"""The part name of test modules that cannot be imported."""


@pytest.hookimpl(tryfirst=True)  # before MPI_Init, which waits for all ranks: no rank has written to the journal yet
def pytest_configure(config: pytest.Config) -> None:
    journal = Journal(Path(os.environ[JOURNAL]))
    done = {name for label in journal.labels() for name in journal.names(label)}
    config.pluginmanager.register(_Recorder(journal, done), "compatibility-recorder")


class _Recorder:
    """Selects the tests on all ranks, and writes the journal on rank 0."""

    def __init__(self, journal: Journal, done: set[str]) -> None:
        self._journal = journal
        self._done = done
        self._parts: dict[str, str] = {}
        self._worst = Verdict(PASS)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Select the marked tests that have not run yet."""
        for item in items:
            if mark := item.get_closest_marker("each_torch"):
                (self._parts[item.nodeid],) = mark.args
        chosen = [item for item in items if item.nodeid in self._parts and item.nodeid not in self._done]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a module that cannot be imported."""
        if report.failed and self._is_first():
            self._journal.start(UNREADABLE, report.nodeid)
            self._journal.end(UNREADABLE, report.nodeid, verdicts.of_report(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._worst = Verdict(PASS)
        if self._is_first():
            self._journal.start(self._parts[nodeid], nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the verdict of a phase that did not pass; the first failure takes precedence."""
        if report.failed or (report.skipped and self._worst.outcome == PASS):
            self._worst = self._worst if self._worst.outcome == FAIL else verdicts.of_report(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._is_first():
            self._journal.end(self._parts[nodeid], nodeid, self._worst)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Record that all tests have run, unless pytest stopped early."""
        stopped = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
        if exitstatus not in stopped and self._is_first():
            self._journal.finish()

    @staticmethod
    def _is_first() -> bool:
        from mpicomm import mpi

        return mpi.job_comm().rank == 0
