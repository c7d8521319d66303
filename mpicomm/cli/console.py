"""Where commands print their tables."""

from __future__ import annotations

import sys

from rich.console import Console

_WIDTH = 1000  # of what is not a terminal: rows are not to be broken


def console() -> Console:
    """Return the standard output as rich sees it."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH)
