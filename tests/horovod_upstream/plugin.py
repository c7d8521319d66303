"""The pytest plugin of the ranks: they agree on the verdict of every test, and rank 0 writes it to a journal.

A test in which a rank fails while others wait, or that exceeds its time limit, ends the job. After a failed test the
job ends, too: the ranks may have submitted different tensors. The next job continues with the other tests.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol

import mpicomm
import mpicomm.horovod as hvd
from tests.conformance import verdicts
from tests.conformance.journal import Journal
from tests.conformance.verdicts import Verdict

LABEL = "horovod"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, required=True)
    parser.addoption("--limit", type=float, required=True, help="time limit of a test in seconds")


def pytest_configure(config: pytest.Config) -> None:
    _add_test_helper()
    # The tests pass parameters of all shapes to every optimizer of torch; torch's Muon refuses all but matrices.
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "muon"  # they choose the optimizers whose module is torch.optim
    config.pluginmanager.register(_Ranks(Journal(config.getoption("--journal")), config.getoption("--limit")))


def _add_test_helper() -> None:
    """Provide the module of Horovod's launcher that its test helpers import; the tests do not call it."""

    def in_thread(target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    for name in ("horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"):
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["horovod.runner.util.threads"])["in_thread"] = in_thread


class _Ranks:
    """Runs every test on all ranks."""

    def __init__(self, journal: Journal, limit: float) -> None:
        self._journal = journal
        self._limit = limit

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = self._journal.names(LABEL)
        items[:] = [item for item in items if item.name not in done]
        for item in items:  # Horovod skips this test because of a defect of its own
            if item.name == "test_timeline_api":
                item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "skip"]
        if not items:  # the last test has failed
            self._journal.finish()

    def pytest_collection_finish(self) -> None:
        hvd.init()  # the test file, which has been imported, has set the variables
        comm = mpicomm.current_world().comm
        assert comm is not None
        self._comm = comm

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        if self._comm.rank == 0:
            self._journal.start(LABEL, item.name)
        faulthandler.dump_traceback_later(self._limit, exit=True, file=sys.__stderr__)
        try:
            own = _verdict(runtestprotocol(item, nextitem=nextitem, log=False))
            verdict = self._journal.agree(self._comm, LABEL, item.name, own, self._limit)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if self._comm.rank == 0:
            self._journal.end(LABEL, item.name, verdict)
        if verdict.outcome == verdicts.FAIL:
            self._comm.Barrier()
            os._exit(1)
        return True

    def pytest_sessionfinish(self) -> None:
        if self._comm.rank == 0:
            self._journal.finish()


def _verdict(reports: list[pytest.TestReport]) -> Verdict:
    """Return the verdict of this rank from the reports of the set-up, the test and the teardown."""
    not_passed = sorted((each for each in reports if each.failed or each.skipped), key=lambda each: each.skipped)
    if not not_passed:
        return Verdict(verdicts.PASS)
    if not_passed[0].failed:
        sys.stderr.write(f"{not_passed[0].longreprtext}\n")
    return verdicts.of_report(not_passed[0])
