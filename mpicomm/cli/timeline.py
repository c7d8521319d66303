"""`mpicomm timeline`: writes the dump files of a job as a trace or a page, with all ranks on one time axis."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicomm import terminal
from mpicomm.cli.console import console, failed, print_json
from mpicomm.reports import job_trace, timeline_page

if TYPE_CHECKING:
    from rich.table import Table

_DEFAULT_TRACE = Path("trace.json")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "timeline",
        help="show the dump files of a job on one time axis",
        description="Write the operations in the dump files of a job as a trace, which https://ui.perfetto.dev opens, "
        "or as an HTML page, which any browser opens.",
    )
    parser.add_argument("directory", metavar="DUMPS", type=Path, help="a directory below mpicomm-dumps")
    parser.add_argument("-o", "--output", metavar="F.json", type=Path, help="the trace (default: trace.json)")
    parser.add_argument("--html", metavar="F.html", type=Path, help="write a page; a trace only with --output")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the trace or the page, print a summary, and return the exit status."""
    trace = arguments.output or (None if arguments.html else _DEFAULT_TRACE)
    try:
        dumps = job_trace.read(arguments.directory)
        if trace is not None:
            trace.write_text(json.dumps(job_trace.trace(dumps)))
        if arguments.html is not None:
            title = f"Timeline of {arguments.directory.resolve().name}"
            arguments.html.write_text(timeline_page.page(dumps, title), encoding="utf-8")
    except (OSError, ValueError) as error:
        return failed("timeline", error)
    waits = job_trace.waits(dumps)
    summary, straggler = job_trace.summary(dumps, waits), job_trace.find_straggler(waits)
    if arguments.json:
        print_json(summary | {"straggler": None if straggler is None else dataclasses.asdict(straggler)})
        return 0
    seconds, messages = f"{summary['seconds']:.3f} s", summary["messages"]
    files = ", ".join(str(path) for path in (trace, arguments.html) if path is not None)
    console().print(_table(summary["ranks"]))
    if straggler is not None:
        name = job_trace.name_straggler(dumps, straggler)
        text = f"The other ranks waited longest for {name}: {straggler.seconds:.3f} s in total"
        console().print(text, soft_wrap=True, highlight=False, markup=False)
    console().print(f"{seconds}, {messages} messages with both ends: {files}", soft_wrap=True, highlight=False)
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
