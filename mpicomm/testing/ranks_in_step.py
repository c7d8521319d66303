"""Plugins of a rank: the ranks agree on the outcome of each test, rank 0 reports for all, the others print nothing.

After the collection, after the set-up, call and tear-down of each test, and at the end of the session, the ranks
exchange their outcomes: a test that failed on one rank has failed on all, and all start the next one together. A rank
that failed waits some seconds for the others; if they do not arrive, they are blocked in an operation that this rank
has left: it prints its error and aborts the job.
"""

from __future__ import annotations

import dataclasses
import io
import time
import zlib
from array import array
from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._io import TerminalWriter

from mpicomm import agreement
from mpicomm.recorder import rank_text
from mpicomm.watchdog import error_output

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

PRINTING_SECONDS = 0.2
"""Launchers forward output by pipes; output in flight at the abort may be lost."""

_WAIT_SECONDS = 10.0  # that a failed rank waits for the others: they may still run the test
_PAUSE_SECONDS = 0.001  # between two polls, which would otherwise take the cores from the other ranks
_SHOWN_FAILURES = 8  # different ones of other ranks in one report
_PHASES = {"setup": "set-up", "call": "test", "teardown": "tear-down"}

# The outcomes of a phase on one rank. The ranks agree on the highest of FAILED, XFAILED and, before a test, SKIPPED.
_PASSED, _SKIPPED, _XPASSED, _XFAILED, _FAILED = range(5)
_ENDED = 5  # the rank leaves the session before its end
_COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)  # sessions


class RanksEnded(pytest.exit.Exception):  # type: ignore[name-defined]
    """Ends the session on all ranks."""

    def __init__(self, message: str) -> None:
        super().__init__(message, returncode=2)


@dataclasses.dataclass(frozen=True)
class FailureOnRanks:
    """The failures of several ranks, in place of the traceback in a report of pytest."""

    message: str
    """For pytest's short summary."""

    text: str

    @property
    def reprcrash(self) -> SimpleNamespace:
        """The message where pytest, and its JUnit XML, look for it."""
        return SimpleNamespace(message=self.message)

    def __str__(self) -> str:
        return self.text

    def toterminal(self, writer: Any) -> None:
        """Write the text as pytest writes a traceback."""
        writer.line(self.text)


@dataclasses.dataclass(frozen=True)
class _Failure:
    """A failure on one rank."""

    text: str
    """The traceback, with the output that pytest captured."""

    message: str
    key: str
    """Equal for ranks with the same failure: the values in a traceback can differ."""

    @classmethod
    def of(cls, report: pytest.TestReport) -> _Failure:
        # Unlike `longreprtext`, this keeps the indentation of the first line.
        output = io.StringIO()
        report.toterminal(TerminalWriter(output))
        traceback = output.getvalue().strip("\n")
        sections = [f"{f' {name} ':-^80}\n{content.rstrip()}" for name, content in report.sections if content.strip()]
        crash = getattr(report.longrepr, "reprcrash", None)
        message = traceback if crash is None else crash.message
        # pytest's explanation of an assertion follows it in lines that begin with " +".
        lines = [line for line in message.splitlines() if not line.startswith(" +")]
        place = [] if crash is None else [f"{crash.path}:{crash.lineno}"]
        return cls("\n".join([traceback, *sections]), message, "\n".join([*place, *lines]))


class RanksInStep:
    """Lets the ranks agree on the outcome of each test."""

    def __init__(self, config: pytest.Config, comm: Intracomm) -> None:
        """Use a communicator of all ranks, which no other code uses."""
        self._config = config
        self._comm = comm
        self._collection_errors: list[str] = []
        self._is_in_test = False
        self._failed_subtests: list[str] = []
        self._is_apart = False  # a test has failed here and not on all ranks, or the reverse
        self._is_over = False  # the ranks exchange no more outcomes
        self.waits_after = ""
        """The phase after which this rank waits for the others; empty while it does not wait."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self._comm.rank

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record why this rank cannot collect a file of tests."""
        if report.failed:
            self._collection_errors.append(f"{report.nodeid}:\n{report.longreprtext}")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Check that the collection succeeded on all ranks, with the same tests in the same order (collective)."""
        outcome = _FAILED if session.testsfailed else _PASSED
        error = "\n\n".join(self._collection_errors)
        outcomes = self._exchange(outcome, "the collection", error)
        if _FAILED in outcomes:
            self._add_collection_errors(error)
            raise RanksEnded(f"the collection failed on {_names(_FAILED, outcomes)}")
        tests = "\n".join(item.nodeid for item in session.items)
        if len(set(self._comm.allgather(zlib.crc32(tests.encode())))) > 1:
            raise RanksEnded(
                "the ranks have collected different tests.\nCollect the same tests in the same order on all ranks."
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """Record that a test runs: the reports of its subtests are not exchanged, since their number may differ."""
        self._is_in_test = True
        self._failed_subtests.clear()
        try:
            return (yield)
        finally:
            self._is_in_test = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a subtest that failed: pytest reports it before the test has ended."""
        if self._is_in_test and report.failed:
            self._failed_subtests.append(report.longreprtext)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after all others have changed the report
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Agree on the outcome of the set-up, call or tear-down of a test (collective)."""
        report = yield
        if call.when == "call" and report.passed and self._failed_subtests and not self._is_in_test:
            report.outcome = "failed"
            report.longrepr = "\n\n".join([f"{len(self._failed_subtests)} subtests failed:", *self._failed_subtests])
        if not self._is_in_test and not self._is_over:
            self._agree(f"the {_PHASES[call.when]} of {item.nodeid}", report)
        return report

    @pytest.hookimpl(tryfirst=True)  # before session fixtures, such as the world, are torn down
    def pytest_sessionfinish(self, exitstatus: int | pytest.ExitCode) -> None:
        """Let the other ranks exit, if this rank leaves the session before its end (collective)."""
        if not self._is_over:
            is_complete = exitstatus in _COMPLETE
            self._exchange(_PASSED if is_complete else _ENDED, "the session", f"exit status {exitstatus:d}")
            self._is_over = True

    # -- agreement -----------------------------------------------------------------------------------------------------

    def _agree(self, phase: str, report: pytest.TestReport) -> None:
        outcome = _outcome(report)
        may_hang = self._is_apart and report.when == "teardown"  # the other ranks may tear down other fixtures
        outcomes = self._exchange(outcome, phase, report.longreprtext, may_hang=may_hang)
        if len(set(outcomes)) == 1 and outcome != _FAILED:
            return
        if _FAILED in outcomes:
            self._is_apart |= len(set(outcomes)) > 1
            self._fail(outcome, outcomes, report)
        elif _XFAILED in outcomes:
            if outcome != _XFAILED:
                report.outcome = "skipped"
                report.wasxfail = f"it failed on {_names(_XFAILED, outcomes)}"
        elif report.when == "setup" and _SKIPPED in outcomes and outcome != _SKIPPED:  # those ranks do not run the test
            report.outcome = "skipped"
            path, line, _ = report.location
            report.longrepr = (path, (line or 0) + 1, f"Skipped: the set-up skipped it on {_names(_SKIPPED, outcomes)}")

    def _fail(self, outcome: int, outcomes: Sequence[int], report: pytest.TestReport) -> None:
        """Make the report one of a failure on all ranks, and add those of the failing ranks on rank 0 (collective)."""
        own = _Failure.of(report) if outcome == _FAILED else None
        gathered = self._comm.gather(own)
        if gathered is None:
            if own is None:
                report.outcome, report.longrepr = "failed", f"passed here, failed on {_names(_FAILED, outcomes)}"
            return
        failures = {rank: failure for rank, failure in enumerate(gathered) if failure is not None}
        others = {rank: failure for rank, failure in failures.items() if own is None or failure.key != own.key}
        shown = _sections(others)
        if own is None:
            message = f"{_names(_FAILED, outcomes)}: {next(iter(failures.values())).message}"
            report.outcome = "failed"
            report.longrepr = FailureOnRanks(message, "\n\n".join(shown))  # type: ignore[assignment]
            report.sections = []  # the output of this rank, which has not failed
        elif shown:
            text = "\n\n".join([report.longreprtext, *shown])
            report.longrepr = FailureOnRanks(own.message, text)  # type: ignore[assignment]

    def _add_collection_errors(self, own: str) -> None:
        """Print on rank 0 why other ranks could not collect the tests (collective)."""
        gathered = self._comm.gather(own)
        if gathered is None:
            return
        others = {rank: _Failure(text, "", text) for rank, text in enumerate(gathered) if text and text != own}
        for shown in _sections(others):
            self._config.get_terminal_writer().line(f"\n{shown}")

    def _exchange(self, outcome: int, phase: str, error: str, *, may_hang: bool = False) -> list[int]:
        """Return the outcomes of a phase on all ranks (collective).

        A rank on which it failed waits for the others for a limited time, and then aborts the job.

        Args:
            outcome: The outcome on this rank.
            phase: The phase.
            error: Why it failed on this rank.
            may_hang: Wait for a limited time, whatever the outcome.
        """
        of_ranks = array("q", [0, 0] * self._comm.size)
        request = self._comm.Iallgather(array("q", [outcome, zlib.crc32(phase.encode())]), of_ranks)
        deadline = time.monotonic() + _WAIT_SECONDS if outcome in (_FAILED, _ENDED) or may_hang else float("inf")
        is_over, self._is_over = self._is_over, True  # if an interrupt ends this rank here, it cannot exchange more
        self.waits_after = phase
        while not request.Test():
            if time.monotonic() > deadline:
                self.abort(f"{phase} ended here while others wait:\n{error}")
            time.sleep(_PAUSE_SECONDS)
        self.waits_after = ""
        outcomes, phases = of_ranks[0::2].tolist(), of_ranks[1::2].tolist()
        if outcome == _ENDED:
            return outcomes
        if _ENDED in outcomes:
            raise RanksEnded(f"the session ended on {_names(_ENDED, outcomes)}")
        if len(set(phases)) > 1:
            raise RanksEnded(f"rank {self.rank} has finished {phase}, other ranks another one")
        self._is_over = is_over
        return outcomes

    def abort(self, message: str) -> None:
        """Print a message and abort the job."""
        from mpicomm.job import session_setup

        session_setup.is_first_to_fail()  # the watchdog reports nothing more
        error_output.print_stderr("\n" + "".join(f"[rank {self.rank}] {line}\n" for line in message.splitlines()))
        time.sleep(PRINTING_SECONDS)
        self._comm.Abort(1)


def _outcome(report: pytest.TestReport) -> int:
    is_expected_to_fail = hasattr(report, "wasxfail")
    if report.failed:
        return _XPASSED if report.longreprtext.startswith("[XPASS(strict)]") else _FAILED
    if report.skipped:
        return _XFAILED if is_expected_to_fail else _SKIPPED
    return _XPASSED if is_expected_to_fail else _PASSED


def _sections(failures: Mapping[int, _Failure]) -> list[str]:
    """Return the text of each failure once, below the names of its ranks."""
    text_of = {failure.key: failure.text for failure in reversed(list(failures.values()))}
    ranks_of = agreement.ranks_by_value([failure.key for failure in failures.values()], failures)
    shown = list(ranks_of.items())[:_SHOWN_FAILURES]
    sections = [f"{f' {rank_text.name_ranks(ranks)} ':-^80}\n{text_of[key]}" for key, ranks in shown]
    if left_out := [rank for key in list(ranks_of)[_SHOWN_FAILURES:] for rank in ranks_of[key]]:
        sections.append(f"other failures on {rank_text.name_ranks(left_out)}")
    return sections


def _names(outcome: int, outcomes: Sequence[int]) -> str:
    return rank_text.name_ranks([rank for rank, of_rank in enumerate(outcomes) if of_rank == outcome])


class QuietRank:
    """Withholds the report of a rank other than 0; prints only why pytest ended the session on this rank alone."""

    def __init__(self, config: pytest.Config, rank: int) -> None:
        """Redirect the terminal reporter."""
        self._rank = rank
        config.pluginmanager.getplugin("terminalreporter")._tw._file = io.StringIO()

    def pytest_internalerror(self, excrepr: object) -> None:
        """Print an error in pytest or in a plugin."""
        self._print(f"INTERNALERROR\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Print the reason of `pytest.exit`, unless it is one of all ranks, which rank 0 prints."""
        if not isinstance(excinfo.value, (RanksEnded, KeyboardInterrupt)):
            self._print(f"{excinfo.typename}: {excinfo.value}")

    def _print(self, text: str) -> None:
        error_output.print_stderr("".join(f"[rank {self._rank}] {line}\n" for line in text.splitlines()))
