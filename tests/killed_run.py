"""Runs a command, and waits until all processes whose command line contains a text have ended.

`python -m tests.killed_run PID_FILE TEXT SECONDS COMMAND...` writes the pid of the command to PID_FILE, and exits with
the command's status, or with 128 + n after signal n. It prints the processes that are left after SECONDS, and kills
them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster import processes

LEFT = "left behind: "
_PAUSE = 0.05


def parent(folder: Path) -> int:
    """Return the pid of `mpicomm run`, which this program has written to a file of the folder."""
    return int((folder / "pid").read_text())


def launcher(folder: Path) -> int:
    """Return the pid of the launcher that `mpicomm run` has started."""
    pid = processes.child_of(parent(folder))
    assert pid is not None
    return pid


def rank_1(folder: Path) -> int:
    """Return the pid of rank 1, which may be on a host of the cluster, in another PID namespace.

    `tests.slow_run` has written the namespace and the pid there to a file of the folder.
    """
    written = (folder / "pid-1").read_text()
    return next(pid for pid in _with(str(folder)) if _identity(pid) == written)


KILLS: dict[str, tuple[int, Callable[[Path], int]]] = {
    "TERM": (signal.SIGTERM, parent),
    "INT": (signal.SIGINT, parent),
    "USR1": (signal.SIGUSR1, parent),
    "KILL of mpicomm run": (signal.SIGKILL, parent),
    "KILL of the launcher": (signal.SIGKILL, launcher),
    "KILL of a rank": (signal.SIGKILL, rank_1),
}
"""Signals for a run of `tests.slow_run`, and the process that receives each."""

WARNINGS = [name for name in KILLS if "KILL" not in name]
"""The signals after which there is time for a checkpoint."""


def send_signal(folder: Path, name: str) -> None:
    """Send one of the signals."""
    number, target = KILLS[name]
    os.kill(target(folder), number)


def main(arguments: list[str]) -> int:
    pid_file, text, seconds, *command = arguments
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets commands in the background ignore it
    process = subprocess.Popen(command)
    Path(pid_file).write_text(str(process.pid))
    status = process.wait()
    deadline = time.monotonic() + float(seconds)
    while (found := _with(text)) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    for pid, line in found.items():
        print(f"{LEFT}{line}", flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _with(text: str) -> dict[int, str]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in line and "tests.killed_run" not in line:
                found[int(path.parent.name)] = line
    return found


def _identity(pid: int) -> str:
    """Return the PID namespace of a process, and its pid there; empty if it has ended."""
    try:
        namespace = Path(f"/proc/{pid}/ns/pid").readlink()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
    pids = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return f"{namespace} {pids.split()[-1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
