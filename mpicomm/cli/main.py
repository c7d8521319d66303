"""The command `mpicomm`: parses its arguments and runs the subcommand."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Callable, Sequence

from mpicomm.cli import bench, doctor, info, job, report, run, timeline, top
from mpicomm.cli.argument_types import Parser

_SUBCOMMANDS = (bench, doctor, info, job, report, run, timeline, top)
"""Each has `add_parser`, whose parser sets `run` to the function of the subcommand."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command-line arguments after the program name; None for those of this process.

    Returns:
        The exit status.
    """
    parsed = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    return run(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mpicomm", description="MPI-first collective communications for PyTorch.")
    version = pkgutil.resolve_name("mpicomm:__version__")  # no import: the package is above its modules
    parser.add_argument("--version", action="version", version=f"mpicomm {version}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for subcommand in _SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    return parser
