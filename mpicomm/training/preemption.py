"""Leaving in time: a signal or the end of the allocation becomes a wish, which the ranks agree on between two steps.

Nothing is decided in a signal handler, and no collective runs there: it takes a note.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

STATUS = 85
"""With which a run leaves that wants to go on later."""

_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGTERM, *_WARNINGS)
# Launchers and schedulers repeat SIGTERM after a quarter of a second, and after six; only what comes later is meant.
_AGAIN_SECONDS = 10.0
_ASK_SECONDS = 60.0
_ANSWER_SECONDS = 20.0


class Preempted(SystemExit):
    """The run has left before its end, with a checkpoint; a program that lets this pass ends with status 85."""

    def __init__(self, why: str) -> None:
        super().__init__(STATUS)
        self.why = why


def is_of_all_ranks(error: BaseException | None) -> bool:
    """Tell whether every rank raises this, or none raises anything, so that what is collective can be taken down."""
    return error is None or isinstance(error, Preempted) or getattr(error, "is_everywhere", False)


class StopRequest:
    """Whether this rank wants to leave, and why."""

    def __init__(self) -> None:
        self.why: str | None = None
        self._since: dict[int, float] = {}

    @contextlib.contextmanager
    def listening(self, stop_margin: float | None, *, asks: bool) -> Iterator[None]:
        """Notice signals within the block and, on the rank that asks, the end of the allocation.

        SIGUSR1 and SIGUSR2 stay harmless afterwards, where nothing else handles them: a scheduler's warning must not
        end a program that has done its work.

        Args:
            stop_margin: Seconds before the end of the allocation to leave, but never in the first half of what is left
                now; None never to.
        """
        self.why = None
        self._since.clear()
        before = self._take_over()
        done = threading.Event()
        clock = remaining_seconds(os.environ) if asks and stop_margin is not None else None
        if clock is not None:
            watch = threading.Thread(target=self._watch_clock, args=(clock, stop_margin, done), daemon=True)
            watch.name = "mpicomm-time-left"
            watch.start()
        try:
            yield
        finally:
            done.set()
            for number, handler in before.items():
                came_too_late = number in _WARNINGS and handler is signal.SIG_DFL
                signal.signal(number, _take_no_note if came_too_late else handler)

    def _take_over(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, _frame: types.FrameType | None) -> None:
        now = time.monotonic()
        if now > self._since.setdefault(number, now) + _AGAIN_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.why = self.why or signal.Signals(number).name

    def _watch_clock(self, clock: Callable[[], float | None], stop_margin: float, done: threading.Event) -> None:
        wait, is_first = 0.0, True
        while not done.wait(wait):
            left = clock()
            if left is not None and is_first:
                stop_margin, is_first = min(stop_margin, left / 2), False  # each run of a short job is to come further
            if left is not None and left <= stop_margin:
                self.why = self.why or f"{left:.0f} s are left of the allocation"
                return
            wait = _ASK_SECONDS if left is None else min(_ASK_SECONDS, max(1.0, left - stop_margin))


def _take_no_note(_number: int, _frame: types.FrameType | None) -> None:
    """Handle a signal by nothing; unlike SIG_IGN, programs that this one starts do not inherit it."""


def remaining_seconds(environ: Mapping[str, str]) -> Callable[[], float | None] | None:
    """Return how to ask the scheduler for the time that is left; None without one, or where its command is missing."""
    slurm, pbs = environ.get("SLURM_JOB_ID"), environ.get("PBS_JOBID")
    if slurm and shutil.which("squeue"):
        return lambda: seconds_of_slurm(_answer(["squeue", "--noheader", "--jobs", slurm, "--format", "%L"]))
    if pbs and shutil.which("qstat"):
        return lambda: seconds_of_pbs(_answer(["qstat", "-f", "-F", "json", pbs]), pbs, time.time())
    return None


def seconds_of_slurm(text: str) -> float | None:
    """Return the seconds in what squeue says is left: days-hours:minutes:seconds, from the right; None of no limit."""
    days, _, clock = text.strip().rpartition("-")
    try:
        parts = [int(part) for part in clock.split(":")]
        total = 86400 * int(days or 0)
    except ValueError:  # UNLIMITED, NOT_SET, INVALID or nothing
        return None
    for place, part in enumerate(reversed(parts)):
        total += part * 60**place
    return float(total)


def seconds_of_pbs(text: str, job: str, now: float) -> float | None:
    """Return the seconds that PBS leaves a job: its start and its walltime, since what it has used is told late."""
    try:
        jobs = json.loads(text)["Jobs"]
        about = jobs.get(job) or next(iter(jobs.values()))
        hours, minutes, seconds = map(int, about["Resource_List"]["walltime"].split(":"))
        start = datetime.datetime.strptime(about["stime"], "%a %b %d %H:%M:%S %Y").astimezone()  # the server's own time
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None
    return start.timestamp() + 3600 * hours + 60 * minutes + seconds - now


def _answer(command: list[str]) -> str:
    """Return what a scheduler's command prints; nothing if it fails, which is no reason to end a run."""
    environ = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, env=environ, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
