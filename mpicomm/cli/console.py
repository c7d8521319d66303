"""Where commands print their tables, and what is wrong with them."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

from mpicomm import terminal

FAILED = 2  # argparse's status, for all that is wrong with a command
_WIDTH = 1000  # of what is not a terminal: rows are not to be broken


def console(stream: TextIO | None = None) -> Console:
    """Return a stream as rich sees it, the standard output if left out."""
    return terminal.console(stream, width=_WIDTH)


def failed(command: str, why: object) -> int:
    """Say what is wrong with a command, and return the exit status for that."""
    print(f"mpicomm {command}: {why}", file=sys.stderr)
    return FAILED
