"""The processes of other ranks on this host: their state according to /proc, and how to kill them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from mpicomm import host_info
from mpicomm.watchdog.protocol import LocalProcess

_STATES = {
    "T": "stopped by a signal (SIGSTOP); resume it with SIGCONT",
    "t": "stopped by a debugger",
    "D": "blocked in an uninterruptible system call (disk or network)",
    "R": "running code that holds the GIL",
    "S": "sleeping in code that holds the GIL",
}
_START = 19  # index of the start time among the fields after the name in /proc/<pid>/stat, proc(5)


def this_process() -> LocalProcess:
    """Return the pid and the start time of this process."""
    return LocalProcess(os.getpid(), start_time_of(os.getpid()))


def start_time_of(pid: int) -> str:
    """Return the start time of a process of this host; empty if /proc does not show it."""
    try:
        return f"{_fields(pid)[_START]} {Path(f'/proc/{pid}/ns/pid').readlink()}"
    except OSError:
        return ""


def resident_memory() -> int:
    """Return the resident set size of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process of this host."""
    return _state_code(pid) == "T"


def state_of(pid: int) -> str:
    """Describe the state of a process that does not respond; empty if it is unknown."""
    state = _STATES.get(_state_code(pid))
    return f"process {pid} is {state}" if state else ""


def kill(process: LocalProcess) -> None:
    """Send SIGKILL to a process of this host, unless its pid belongs to another process by now."""
    # The process may have ended; pidfd_open and pidfd_send_signal need a recent Python and Linux.
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # Compare after pidfd_open: the descriptor refers to this process even if its pid is reused.
            if process.start_time and start_time_of(process.pid) == process.start_time:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _state_code(pid: int) -> str:
    try:
        return _fields(pid)[0]
    except OSError:
        return ""


def _fields(pid: int) -> list[str]:
    return host_info.process_stat(Path(f"/proc/{pid}"))[1]
