"""The processes that a cluster started, by pid and start time: a reused pid is never mistaken for one of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests import time_limits
from tests.cluster.layout import ClusterError, Layout


def record(layout: Layout, name: str, pid: int) -> None:
    """Record the pid and the start time of a process under a name."""
    _file(layout, name).write_text(f"{pid} {started(pid)}")


def pid_of(layout: Layout, name: str) -> int | None:
    """Return the pid of the process with this name; None if it has exited."""
    try:
        pid, start = _file(layout, name).read_text().split()
    except OSError:
        return None
    return int(pid) if started(int(pid)) == start else None


def recorded(layout: Layout) -> list[str]:
    """Return the names of all recorded processes, including those that have exited."""
    return sorted(path.name for path in _file(layout, "any").parent.iterdir())


def stop(layout: Layout, name: str, number: int = signal.SIGTERM, seconds: float = 10.0) -> None:
    """Send a signal to a process and wait for its exit; send SIGKILL if that takes more than `seconds`."""
    for each in (number, signal.SIGKILL):
        if (pid := pid_of(layout, name)) is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, each)
        with contextlib.suppress(ClusterError):
            wait_until(lambda: pid_of(layout, name) is None, seconds, f"{name} ends")
    if pid_of(layout, name) is not None:
        raise ClusterError(f"{name}, process {pid}, does not end. Look at /proc/{pid}/stack, then try again.")


def started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks; None if it has exited, even if nothing has reaped it yet."""
    if (fields := _stat(pid)) is None or fields[0] in ("Z", "X"):
        return None
    return fields[19]


def child_of(parent: int) -> int | None:
    """Return the pid of one child of a process; None if it has no child."""
    for path in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(path.name))
        if fields is not None and int(fields[1]) == parent:
            return int(path.name)
    return None


def wait_for_answer(layout: Layout, name: str, answers: Callable[[], object], seconds: float) -> None:
    """Wait until a daemon answers.

    Raises:
        ClusterError: If the daemon does not answer within `seconds`, or exits.
    """
    wait_until(lambda: pid_of(layout, name) is None or answers(), seconds, f"{name} answers")
    if pid_of(layout, name) is None:
        raise ClusterError(f"{name} has ended as soon as it was started.")


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition is true, as `time_limits.wait_until()`.

    Raises:
        ClusterError: If the condition is still false after `seconds`, which are scaled.
    """
    try:
        time_limits.wait_until(condition, what, seconds)
    except TimeoutError as error:
        raise ClusterError(f"{error}.") from None


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third, the state, on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _file(layout: Layout, name: str) -> Path:
    return layout.directory / "pids" / name
