"""`mpicomm timeline`: writes the dump files of a job as a trace, with all ranks on one time axis."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicomm import terminal
from mpicomm.cli.console import console, failed, print_json
from mpicomm.reports import job_trace

if TYPE_CHECKING:
    from rich.table import Table


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "timeline",
        help="show the dump files of a job on one time axis",
        description="Write the operations in the dump files of a job as a trace, which https://ui.perfetto.dev opens.",
    )
    parser.add_argument("directory", metavar="DUMPS", type=Path, help="a directory below mpicomm-dumps")
    parser.add_argument("-o", "--output", metavar="F.json", type=Path, default=Path("trace.json"), help="the trace")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the trace, print a summary, and return the exit status."""
    try:
        dumps = job_trace.read(arguments.directory)
        arguments.output.write_text(json.dumps(job_trace.trace(dumps)))
    except (OSError, ValueError) as error:
        return failed("timeline", error)
    summary = job_trace.summary(dumps)
    if arguments.json:
        print_json(summary)
        return 0
    seconds, messages = f"{summary['seconds']:.3f} s", summary["messages"]
    console().print(_table(summary["ranks"]))
    console().print(
        f"{seconds}, {messages} messages with both ends: {arguments.output}", soft_wrap=True, highlight=False
    )
    return 0


def _table(ranks: list[dict[str, Any]]) -> Table:
    titles = ["rank", "host", "operations", "not over", "waits for others", "others wait for it", "clock"]
    rows = [
        [
            rank["rank"],
            rank["host"],
            rank["operations"],
            rank["not_over"],
            f"{rank['wait_seconds']:.3f} s",
            f"{rank['waited_for_seconds']:.3f} s",
            f"{rank['clock']}, to {rank['clock_error_seconds'] * 1e6:.0f} us"
            if rank["clock_error_seconds"]
            else rank["clock"],
        ]
        for rank in ranks
    ]
    right = ("rank", "operations", "not over", "waits for others", "others wait for it")
    return terminal.table(titles, rows, right=right)
