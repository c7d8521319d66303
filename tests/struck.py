"""Runs a command, and waits until all processes whose command line contains a text have ended.

`python -m tests.struck PID_FILE TEXT SECONDS COMMAND...` writes the pid of the command to PID_FILE, and exits with the
command's status, or with 128 + n after signal n. It prints the processes that are left after SECONDS, and kills them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
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
            if text in line and "tests.struck" not in line:
                found[int(path.parent.name)] = line
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
