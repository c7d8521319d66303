"""Output of the commands: tables on standard output, errors on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, TextIO

from rich.console import Console

from mpicomm import terminal

FAILED = 2  # argparse's exit status, for every error of a command
_WIDTH = 1000  # columns if the stream is not a terminal: rows must not wrap


def console(stream: TextIO | None = None) -> Console:
    """Return a rich console for a stream, standard output by default."""
    return terminal.console(stream, width=_WIDTH)


def print_json(value: Any) -> None:
    """Print a value as JSON, which supports neither infinities nor NaN."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_message(command: str, message: object) -> None:
    """Print a message of a subcommand on standard error; a closed pipe or terminal does not raise an error."""
    try:
        print(f"mpicomm {command}: {message}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null: Python writes its buffer at exit, and would exit with status 120."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def failed(command: str, why: object) -> int:
    """Print an error of a subcommand, and return its exit status."""
    print_message(command, why)
    return FAILED
