"""Preemption: a signal or the end of the allocation becomes a stop request, on which the ranks vote between two steps.

The signal handler only records the signal. The decision is made between two steps, and the handler runs no collective
operation. The remaining time of a job comes from its scheduler: Slurm, PBS, LSF or Flux.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpicomm.errors import RankFailedError
from mpicomm.launch.queries import output_of
from mpicomm.settings import STOPPED_STATUS

_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGTERM, *_WARNINGS)
# Launchers and schedulers repeat SIGTERM after 0.25 s and after 6 s. Only a signal that is repeated later than this
# after the first one ends the process at once.
_REPEAT_SECONDS = 10.0
_POLL_SECONDS = 60.0  # maximum interval of scheduler queries
_UNLIMITED_IN_FLUX = 2**32 - 1  # the seconds that Flux reports for a job without a limit


class Preempted(SystemExit):
    """Raised on every rank when a run stops before its end, after it has saved a checkpoint.

    A program that does not catch it exits with status 85. Start the program again to resume the run.

    Attributes:
        why: The reasons and the ranks that requested the stop, such as `SIGTERM on rank 1`.
    """

    def __init__(self, why: str) -> None:
        super().__init__(STOPPED_STATUS)
        self.why = why


def is_of_all_ranks(error: BaseException | None) -> bool:
    """Return whether all ranks raise this error, or none raises any, so that collective clean-up cannot hang."""
    if isinstance(error, RankFailedError):
        return False  # the failed ranks do not take part
    return error is None or isinstance(error, Preempted) or getattr(error, "is_on_all_ranks", False)


class StopRequest:
    """The stop request of this rank: `why` is its reason, or None."""

    def __init__(self) -> None:
        self.why: str | None = None
        self._since: dict[int, float] = {}

    def reset(self) -> None:
        """Forget earlier requests."""
        self.why = None
        self._since.clear()

    @contextlib.contextmanager
    def handling_signals(self, stop_margin: float | None, *, polls_scheduler: bool) -> Iterator[None]:
        """Handle signals within the block and, if `polls_scheduler`, poll the scheduler for the remaining time.

        After the block SIGUSR1 and SIGUSR2 have no effect unless the program had a handler for them: a scheduler's
        warning must not end a program that has finished training.

        Args:
            stop_margin: Seconds before the end of the allocation at which to request a stop, limited to half of the
                time that remains at the first poll. None disables polling.
            polls_scheduler: Whether this rank polls the scheduler, in a separate thread.
        """
        before = self._install_handlers()
        done = threading.Event()
        query = remaining_time_query(os.environ) if polls_scheduler and stop_margin is not None else None
        if query is not None:
            watch = threading.Thread(target=self._poll_scheduler, args=(query, stop_margin, done), daemon=True)
            watch.name = "mpicomm-time-left"
            watch.start()
        try:
            yield
        finally:
            done.set()
            for number, handler in before.items():
                is_late_warning = number in _WARNINGS and handler is signal.SIG_DFL
                signal.signal(number, _ignore if is_late_warning else handler)

    def _install_handlers(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        signals = (*SIGNALS, signal.SIGALRM) if "FLUX_JOB_ID" in os.environ else SIGNALS  # Flux's signal at the limit
        return {number: signal.signal(number, self._record) for number in signals}

    def _record(self, number: int, _frame: types.FrameType | None) -> None:
        now = time.monotonic()
        if now > self._since.setdefault(number, now) + _REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.why = self.why or signal.Signals(number).name

    def _poll_scheduler(self, query: Callable[[], float | None], stop_margin: float, done: threading.Event) -> None:
        wait, is_first = 0.0, True
        while not done.wait(wait):
            wait, remaining = _POLL_SECONDS, query()
            if remaining is None:
                continue
            if is_first:  # so that each run of a short job progresses
                stop_margin, is_first = min(stop_margin, remaining / 2), False
            if remaining <= stop_margin:
                self.why = self.why or f"{remaining:.0f} s remaining in the allocation"
                return
            wait = min(_POLL_SECONDS, max(1.0, remaining - stop_margin))


def _ignore(_number: int, _frame: types.FrameType | None) -> None:
    """Ignore a signal; child processes do not inherit a handler, unlike SIG_IGN."""


# -- the remaining time of a job ---------------------------------------------------------------------------------------


def remaining_time_query(environ: Mapping[str, str]) -> Callable[[], float | None] | None:
    """Return a function that queries the scheduler for the remaining seconds.

    Returns:
        None outside of jobs, and where the command of the scheduler is missing.
    """
    flux, slurm = environ.get("FLUX_JOB_ID"), environ.get("SLURM_JOB_ID")
    pbs, lsf = environ.get("PBS_JOBID"), environ.get("LSB_JOBID")
    if flux and shutil.which("flux"):  # SLURM_* may describe the job that contains the instance
        return lambda: seconds_of_flux(output_of(["flux", "job", "timeleft"]))
    if slurm and shutil.which("squeue"):
        return lambda: seconds_of_slurm(output_of(["squeue", "--noheader", "--jobs", slurm, "--format", "%L"]))
    if pbs and shutil.which("qstat"):
        return lambda: seconds_of_pbs(output_of(["qstat", "-f", "-F", "json", pbs]), pbs, time.time())
    if lsf and shutil.which("bjobs"):
        index = environ.get("LSB_JOBINDEX", "0")
        job = lsf if index == "0" else f"{lsf}[{index}]"
        return lambda: seconds_of_lsf(output_of(["bjobs", "-noheader", "-o", "time_left", job]))
    return None


def seconds_of_slurm(text: str) -> float | None:
    """Return the seconds of squeue's `%L` field, [days-][hours:][minutes:]seconds; None if it is not a duration."""
    days, _, time_of_day = text.strip().rpartition("-")
    try:
        parts = [int(part) for part in time_of_day.split(":")]
        total = 86400 * int(days or 0)
    except ValueError:  # UNLIMITED, NOT_SET, INVALID or nothing
        return None
    for exponent, part in enumerate(reversed(parts)):  # leading units may be absent
        total += part * 60**exponent
    return float(total)


def seconds_of_pbs(text: str, job: str, now: float) -> float | None:
    """Return the remaining seconds of a PBS job, from its start and walltime: PBS updates the used time late."""
    try:
        jobs = json.loads(text)["Jobs"]
        about = jobs.get(job) or next(iter(jobs.values()))
        hours, minutes, seconds = map(int, about["Resource_List"]["walltime"].split(":"))
        # stime is in the local time of the server.
        start = datetime.datetime.strptime(about["stime"], "%a %b %d %H:%M:%S %Y").astimezone()
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None
    return start.timestamp() + 3600 * hours + 60 * minutes + seconds - now


def seconds_of_lsf(text: str) -> float | None:
    """Return the seconds of the `time_left` of bjobs, hours:minutes and a letter; None without a limit."""
    match = re.fullmatch(r"\s*(\d+):(\d+)(?: [A-Z])?\s*", text)
    return 3600.0 * int(match[1]) + 60.0 * int(match[2]) if match else None


def seconds_of_flux(text: str) -> float | None:
    """Return the seconds that `flux job timeleft` prints; None without a limit, for which it prints 2^32 - 1."""
    seconds = int(text) if text.strip().isdigit() else _UNLIMITED_IN_FLUX
    return float(seconds) if seconds < _UNLIMITED_IN_FLUX else None
