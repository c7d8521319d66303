"""Records which marks a test executes, and how long it takes, in an instrumented copy of the checkout.

Code of the package calls `hit` where a mutant is. Processes that a test starts inherit the name of the test. As a
plugin of pytest, this module also records the outcome and the duration of each test. What a fixture of a module does
counts for every test that uses it, and has the name of the fixture.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import job_origin

RESULTS = "TESTS_RESULTS"
"""The variable with the file to which the plugin appends a line for each phase of a test."""

_HITS = Path(__file__).with_name("hits")
_SHARED = "shared fixtures"
_seen: set[tuple[str, int]] = set()


def hit(mark: int) -> None:
    """Record at once that a test executes the code at a mark: the process may be killed later."""
    test = job_origin.name()
    if test and (test, mark) not in _seen:
        _seen.add((test, mark))
        folder = folder_of(test)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(mark)).touch()


def folder_of(test: str) -> Path:
    """Return the directory with a file for each mark that a test or fixture has executed."""
    return _HITS / hashlib.sha256(test.encode()).hexdigest()[:20]


class _Recorder:
    def pytest_runtest_logreport(self, report) -> None:
        shared = dict(report.user_properties).get(_SHARED, {})
        with Path(os.environ[RESULTS]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.when, report.outcome, report.duration, shared]) + "\n")


class _SharedFixtures:
    """Gives fixtures of a module names of their own, and notes for each test those that it uses, and their duration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        name, start = f"{fixturedef.baseid}::{fixturedef.argname}", time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(job_origin.VARIABLE, name)
            try:
                return (yield)
            finally:
                self.seconds[name] = time.monotonic() - start

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_call(self, item) -> None:
        names = [name for name in self.seconds if name.rpartition("::")[2] in item.fixturenames]
        own = {name: self.seconds[name] for name in names if item.nodeid.startswith(name.rpartition("::")[0])}
        item.user_properties.append((_SHARED, own))


def pytest_configure(config) -> None:
    if RESULTS in os.environ:
        config.pluginmanager.register(_SharedFixtures())
        if "PYTEST_XDIST_WORKER" not in os.environ:  # the controller reports for its workers
            config.pluginmanager.register(_Recorder())
