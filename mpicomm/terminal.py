"""Tables, durations, sizes and errors as text; whether a terminal shows the output of this process, and its width.

Launchers relay the output of their ranks. Open MPI gives each rank a pseudo-terminal of 80 columns even if the launcher
itself writes to a file or a pipe; MPICH gives each rank a pipe even if it writes to a terminal. In a rank, the output
of the launcher therefore decides. /proc shows it if the launcher runs on this node.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpicomm import host_info
from mpicomm.launch.known_launchers import starts_ranks

_BINARY_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_UNKNOWN_COLUMNS = 80  # width of a terminal that does not report its size


def console(stream: TextIO | None = None, *, width: int) -> Console:
    """Return a rich console for a stream; it uses colours and the terminal's width only on a terminal.

    Args:
        stream: The stream; standard output by default.
        width: The width in columns where the output is not shown on a terminal.
    """
    stream = stream or sys.stdout
    shown_width = columns(stream)
    return Console(
        file=stream,
        width=shown_width or width,
        force_terminal=shown_width is not None,
        color_system=None if os.environ.get("NO_COLOR") else "auto",  # rich itself would still print bold and italics
    )


def table(
    titles: Sequence[str], rows: Iterable[Sequence[object] | None], *, right: Collection[str] = (), **options: Any
) -> Table:
    """Return a table.

    Args:
        titles: The titles of the columns.
        rows: The cells of each row; None for a line between rows.
        right: The titles of the columns that are aligned to the right.
        options: Further arguments of `rich.table.Table`.
    """
    shown = Table(title_justify="left", **options)
    for title in titles:
        shown.add_column(Text(title), justify="right" if title in right else "left")
    for row in rows:
        if row is None:
            shown.add_section()
        else:
            shown.add_row(*[Text(str(cell)) for cell in row])  # Text: rich would parse [bold] in a str as markup
    return shown


def columns(stream: TextIO) -> int | None:
    """Return the width in columns of the terminal that shows a stream; None if no terminal shows it."""
    try:
        own = stream.fileno()
        launchers = [pid for pid, name in processes_above() if starts_ranks(name)]
        is_relayed = bool(launchers) and own in (1, 2)
        if not is_relayed:
            return _width(own)
        if stat.S_ISREG(os.fstat(own).st_mode):  # redirected by the rank itself: the launcher does not relay it
            return None
        return _width_of_file(f"/proc/{launchers[-1]}/fd/{own}")
    except (OSError, ValueError):
        return None


def processes_above() -> list[tuple[int, str]]:
    """Return the process ids and names of the ancestors of this process, the parent first."""
    ancestors: list[tuple[int, str]] = []
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
            name, (_state, parent, *_) = host_info.process_stat(Path(f"/proc/{pid}"))
            ancestors.append((pid, name))
            pid = int(parent)
    return ancestors


def _width_of_file(path: str) -> int | None:
    if not stat.S_ISCHR(Path(path).stat().st_mode):  # opening a pipe or a socket could have side effects
        return None
    file = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        return _width(file)
    finally:
        os.close(file)


def _width(file: int) -> int | None:
    return (os.get_terminal_size(file).columns or _UNKNOWN_COLUMNS) if os.isatty(file) else None


def format_duration(seconds: float) -> str:
    """Return a duration as minutes:seconds, or hours:minutes:seconds."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_size(nbytes: int) -> str:
    """Return a size with a binary unit, such as 64 MiB."""
    factor, unit = next((factor, unit) for factor, unit in _BINARY_UNITS if nbytes >= factor or factor == 1)
    return f"{nbytes / factor:.4g} {unit}"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or its type if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]
