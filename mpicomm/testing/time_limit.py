"""The time limit of a test on several ranks: every rank prints its stack, rank 0 pytest's report, and the job ends."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpicomm.testing.ranks_in_step import RanksInStep

MARKER = "rank_timeout(seconds): the time limit of a test on several ranks; 0: none"

_OPTION, _SETTING = "--rank-timeout", "rank_timeout"
_PRINTING_SECONDS = 2.0  # for all ranks to print their stacks, before rank 0 reports and aborts the job
_LATER_SECONDS = 15.0  # after which another rank aborts the job, if rank 0 cannot; then the C code of faulthandler
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_MACHINERY = ("_pytest", "pluggy")  # the packages whose frames are above those of a test


def add_options(parser: pytest.Parser, group: pytest.OptionGroup) -> None:
    """Add `--rank-timeout` and the setting `rank_timeout`."""
    group.addoption(
        _OPTION,
        metavar="SECONDS",
        type=_seconds,
        help="with several ranks, the time limit of each test with its fixtures: every rank prints its stack, and the "
        "job ends; 0: none",
    )
    parser.addini(_SETTING, f"default for {_OPTION} (no limit)", default="0")


class TimeLimit:
    """Ends the job if a test takes too long."""

    def __init__(self, config: pytest.Config, in_step: RanksInStep) -> None:
        """Read the time limit of the session.

        Raises:
            pytest.UsageError: If the setting is not a number of seconds.
        """
        self._config = config
        self._in_step = in_step
        option = config.getoption(_OPTION)
        self._session_limit = _checked(config.getini(_SETTING), _SETTING) if option is None else option

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Start and stop the timer of a test, which includes its fixtures and the wait for the other ranks."""
        limit = self._limit(item)
        if not limit:
            return (yield)
        timer = threading.Timer(limit, self._end, [item, limit])
        timer.name, timer.daemon = "mpicomm-rank-timeout", True
        timer.start()
        # The timer cannot run if C code holds the GIL. pytest's own faulthandler_timeout uses the same timer in C.
        is_ours = not float(self._config.getini("faulthandler_timeout") or 0)
        if is_ours:
            assert sys.__stderr__ is not None  # `pytest_plugin` has opened it
            faulthandler.dump_traceback_later(limit + 2 * _LATER_SECONDS, file=sys.__stderr__, exit=True)
        try:
            return (yield)
        finally:
            timer.cancel()
            if is_ours:
                faulthandler.cancel_dump_traceback_later()

    def _limit(self, item: pytest.Item) -> float:
        marker = item.get_closest_marker(_SETTING)
        if marker is None:
            return self._session_limit
        if len(marker.args) != 1 or marker.kwargs:
            raise pytest.UsageError(f"{item.nodeid}: expected rank_timeout(seconds), got {marker.args}")
        return _checked(marker.args[0], f"{item.nodeid}: rank_timeout")

    def _end(self, item: pytest.Item, limit: float) -> None:
        from mpicomm.watchdog import error_output

        rank = self._in_step.rank
        message = f"timed out after {limit:g} s (rank_timeout)"
        lines = f"{item.nodeid} {message}; {self._position()}".splitlines()
        error_output.print_stderr("\n" + "".join(f"[rank {rank}] {line}\n" for line in lines))
        time.sleep(_PRINTING_SECONDS if rank == 0 else _LATER_SECONDS)
        if rank == 0:
            self._report(item, limit, message)
        self._in_step.abort(f"aborts the job: {item.nodeid} {message}")

    def _position(self) -> str:
        """Return where the main thread is, and the operations that it or another thread has called."""
        from mpicomm.recorder import flight_recorder, rank_text

        if phase := self._in_step.waits_after:
            return f"this rank has finished {phase}, and waits for the other ranks"
        stack: list[traceback.FrameSummary] = traceback.extract_stack(
            sys._current_frames()[threading.main_thread().ident or 0]
        )
        above = max((index for index, call in enumerate(stack) if _is_machinery(call.filename)), default=-1)
        stack = stack[above + 1 :] or stack
        now = time.monotonic()
        infos = [operation.describe(now) for operation in flight_recorder.running()]
        operations = [f"  in {rank_text.describe_operation(info)}, for {info.seconds or 0:.0f} s" for info in infos]
        while operations and len(stack) > 1 and stack[-1].filename.startswith(_PACKAGE):
            stack.pop()  # below the call of the operation
        return "\n".join(["it is at:", *"".join(traceback.format_list(stack)).splitlines(), *operations])

    def _report(self, item: pytest.Item, limit: float, message: str) -> None:
        """Print pytest's report of the tests until now and write the file of --junitxml, instead of the main thread."""
        from _pytest.junitxml import LogXML

        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", f"{message}; the stack of each rank is in the output", "call",
            duration=limit,
        )  # fmt: skip
        plugins = self._config.pluginmanager
        with contextlib.suppress(Exception):  # the job must end in any case
            plugins.getplugin("capturemanager").suspend(in_=True)
            item.ihook.pytest_runtest_logreport(report=report)
            for plugin in plugins.get_plugins():
                if isinstance(plugin, LogXML):
                    plugin.pytest_sessionfinish()
            reporter = plugins.getplugin("terminalreporter")
            reporter.summary_failures()
            reporter.short_test_summary()
            reporter.summary_stats()
            sys.stdout.flush()


def _is_machinery(file: str) -> bool:
    return not {*_MACHINERY}.isdisjoint(Path(file).parts)


def _seconds(text: object) -> float:
    try:
        seconds = float(str(text))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, or 0 for no limit, got {text}")
    return seconds


def _checked(text: object, name: str) -> float:
    try:
        return _seconds(text)
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"{name}: {error}") from None
