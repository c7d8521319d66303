"""Results of the tests, and the jobs that they run.

Those of tests/integrations/test_NAME.py are written to docs/results/integrations-NAME.json.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from mpicomm import job_info
from mpicomm.reports import result_files
from tests.launching import ROOT

JOB = "job"
"""The name of the property of a test that is a job: its command, status, seconds, and `found`, figures by name."""

COMMAND = "make integrations"
_DIRECTORY = ROOT / "docs" / "results"


@dataclasses.dataclass
class Result:
    """The result of a test."""

    outcome: str = "passed"
    """passed, failed or skipped."""

    reason: str = ""
    jobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Recorder:
    """A pytest plugin that keeps the results of all tests."""

    def __init__(self) -> None:
        self._tests: dict[str, dict[str, Result]] = {}
        self._packages: dict[str, tuple[str, ...]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._packages[_name(item.nodeid)] = item.module.PACKAGES

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(_name(report.nodeid), {}).setdefault(report.nodeid.partition("::")[2], Result())
        if report.outcome != "passed":
            test.outcome = report.outcome
            test.reason = _reason(report)
        if report.when == "teardown":
            test.jobs = [job for name, job in report.user_properties if name == JOB]

    def write(self) -> list[Path]:
        """Write the file of each integration of which tests have run, and return the paths."""
        paths = []
        for name, tests in self._tests.items():
            head = job_info.description("integration tests, and the jobs that they have run; seconds", COMMAND)
            head["versions"] |= {each: version(each) or "not installed" for each in self._packages[name]}
            path = _DIRECTORY / f"integrations-{name}.json"
            result_files.write(
                path, {**head, "tests": {test: dataclasses.asdict(each) for test, each in tests.items()}}
            )
            paths.append(path)
        return paths


def _name(nodeid: str) -> str:
    """Return the name of the integration that a test belongs to."""
    return Path(nodeid.partition("::")[0]).stem.removeprefix("test_").replace("_", "-")


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line and reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(getattr(report.longrepr, "reprcrash", report.longrepr)).splitlines()[0]
