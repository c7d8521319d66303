"""Whether a person reads the output of this process on a terminal, and how wide that terminal is.

Launchers relay the output of their ranks. Open MPI gives each rank a pseudo-terminal of 80 columns even where the
launcher itself writes to a file or a pipe; MPICH gives each a pipe even where it writes to a terminal. So in a rank the
launcher's own output decides, which /proc shows where the launcher runs on this node.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console

_LAUNCHERS = re.compile(r"mpirun|mpiexec|prterun|prted|orterun|orted|srun|hydra|torchrun|aprun|jsrun")
_UNKNOWN_COLUMNS = 80  # of a terminal that does not report its size


def console(stream: TextIO | None = None, *, width: int) -> Console:
    """Return a stream as rich sees it: with colours, and folded to the terminal's width, on a terminal alone.

    Args:
        stream: The standard output if left out.
        width: The columns to use where the output is not shown on a terminal.
    """
    stream = stream or sys.stdout
    found = columns(stream)
    return Console(
        file=stream,
        width=found or width,
        force_terminal=found is not None,
        color_system=None if os.environ.get("NO_COLOR") else "auto",  # rich itself would still print bold and italics
    )


def columns(stream: TextIO) -> int | None:
    """Return the width of the terminal on which a stream is shown; None if it is not shown on one."""
    try:
        own = stream.fileno()
        launchers = [pid for pid, name in processes_above() if _LAUNCHERS.search(name)]
        is_relayed = bool(launchers) and own in (1, 2)
        if not is_relayed:
            return _width(own)
        if stat.S_ISREG(os.fstat(own).st_mode):  # the rank's own redirection: the launcher does not see this output
            return None
        return _width_of_file(f"/proc/{launchers[-1]}/fd/{own}")
    except (OSError, ValueError):
        return None


def processes_above() -> list[tuple[int, str]]:
    """Return the processes above this one with their names, the nearest first."""
    found: list[tuple[int, str]] = []
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            found.append((pid, name))
            pid = int(rest.split()[1])
    return found


def _width_of_file(path: str) -> int | None:
    if not stat.S_ISCHR(Path(path).stat().st_mode):  # opening a pipe or a socket could have effects
        return None
    file = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        return _width(file)
    finally:
        os.close(file)


def _width(file: int) -> int | None:
    return (os.get_terminal_size(file).columns or _UNKNOWN_COLUMNS) if os.isatty(file) else None
