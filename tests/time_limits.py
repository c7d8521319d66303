"""The time limits of the tests, and the wait for an event.

All limits are in seconds of an idle reference machine. `scaled()` multiplies them by the slowness of this machine, so
that a busy or slow machine does not fail a test. `run_ranks()`, `run_command()` and `wait_until()` do so themselves.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

JOB_SECONDS = 180.0
"""The limit of a job: many times its usual duration."""

EVENT_SECONDS = 60.0
"""The limit of the wait for an event, such as the start of a rank."""

_HIGHEST_SLOWNESS = 5.0  # limits that are longer delay the report of a hang too much
_REFERENCE_SECONDS = 0.004  # for `_work()` on one core of the machine on which the limits were chosen
_PAUSE = 0.02
_VARIABLE = "TESTS_CORE_SLOWNESS"  # passed to jobs, whose ranks need not measure


def scaled(seconds: float) -> float:
    """Return a time limit for this machine: `seconds`, or up to five times as many if the machine is slow or busy."""
    return seconds * slowness()


def slowness() -> float:
    """Return how many times slower than an idle reference machine this machine is now, from 1 to 5.

    The speed of a core is measured once in a process. The load is read at each call: the load average, which is that
    of the last minute, or the number of processes that can run at this moment.
    """
    load, _, _, processes, _ = Path("/proc/loadavg").read_text().split()
    runnable = int(processes.partition("/")[0])
    busy = max(1.0, max(float(load), runnable) / (os.cpu_count() or 1))
    return min(_HIGHEST_SLOWNESS, busy * core_slowness())


@functools.cache
def core_slowness() -> float:
    """Return how many times slower one core is than a core of the reference machine; at least 1."""
    if _VARIABLE in os.environ:
        return float(os.environ[_VARIABLE])
    # The fastest of several short runs is the one that other processes have disturbed the least.
    return max(1.0, min(_work() for _ in range(5)) / _REFERENCE_SECONDS)


def for_jobs() -> dict[str, str]:
    """Return the environment variable that spares the processes of a job the measurement."""
    return {_VARIABLE: f"{core_slowness():.2f}"}


def wait_until(condition: Callable[[], T], what: str, seconds: float = EVENT_SECONDS) -> T:
    """Wait until a condition is true, and return its value.

    Args:
        condition: It is called every 20 ms.
        what: What is true then, in the present tense: "the training has begun".
        seconds: The limit, before it is scaled.

    Raises:
        TimeoutError: If the condition is still false at the limit.
    """
    start = time.monotonic()
    while not (value := condition()):
        if (passed := time.monotonic() - start) > scaled(seconds):  # the load may have changed
            raise TimeoutError(f"timed out after {passed:.0f} s, waiting until {what}")
        time.sleep(_PAUSE)
    return value


def synchronise(folder: Path, name: object, names: Iterable[object]) -> None:
    """Write the pid of this process to a file, and wait until all processes with these names have done so."""
    written = folder / f"new-{name}"
    written.write_text(str(os.getpid()))
    written.rename(folder / str(name))
    files = [folder / str(other) for other in names]
    wait_until(lambda: all(file.exists() for file in files), f"all of {[file.name for file in files]} have arrived")


def _work() -> float:
    start, total = time.perf_counter(), 0
    for number in range(50_000):
        total += number & 7
    return time.perf_counter() - start
