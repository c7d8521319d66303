"""The processes of other ranks on this host: what the system says of them, and their end if nobody else sees to it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from pathlib import Path

_STATES = {
    "T": "stopped by a signal (SIGSTOP); resume it with SIGCONT",
    "t": "stopped by a debugger",
    "D": "in a system call that does not return (disk or network)",
    "R": "computing, in code that keeps the GIL",
    "S": "asleep, in code that keeps the GIL",
}
_START = 19  # of the fields behind the name in /proc/<pid>/stat: when it was started, proc(5)


@dataclasses.dataclass(frozen=True)
class LocalProcess:
    """A process, as it has introduced itself."""

    pid: int
    birth: str = ""
    """When it was started, and where its pid is valid: no other process of this host ever has both."""


def this_process() -> LocalProcess:
    """Return how this process introduces itself."""
    return LocalProcess(os.getpid(), birth_of(os.getpid()))


def birth_of(pid: int) -> str:
    """Return the birth of a process of this host; empty if it cannot be seen."""
    try:
        return f"{_fields(pid)[_START]} {Path(f'/proc/{pid}/ns/pid').readlink()}"
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Tell whether a signal has stopped a process of this host."""
    try:
        return _fields(pid)[0] == "T"
    except OSError:
        return False


def state_of(pid: int) -> str:
    """Say what the system knows of a rank that does not answer; empty if that is nothing."""
    try:
        state = _STATES.get(_fields(pid)[0])
    except OSError:
        return ""
    return f"process {pid} is {state}" if state else ""


def kill(process: LocalProcess) -> None:
    """Kill a process of this host, if it is still the one that has introduced itself."""
    with contextlib.suppress(OSError, AttributeError):  # it has ended; or this Python or Linux is too old
        descriptor = os.pidfd_open(process.pid)
        try:
            # Looked at once the descriptor holds it: from here on its pid cannot become another's.
            if process.birth and birth_of(process.pid) == process.birth:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
