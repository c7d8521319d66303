"""`mpicomm timeline`: writes the dump files of a job as a trace or a page, with all ranks on one time axis."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mpicomm.cli.argument_types import check_outputs, html
from mpicomm.cli.console import console, failed, print_json
from mpicomm.reports import job_summary, job_trace, timeline_page

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
    parser.add_argument("--html", metavar="F.html", type=html, help="write a page; a trace only with --output")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the trace or the page, print a summary, and return the exit status."""
    trace = arguments.output or (None if arguments.html else _DEFAULT_TRACE)
    try:
        if trace is _DEFAULT_TRACE and trace.exists():
            raise FileExistsError(f"{trace} exists.\nReplace it with -o {trace}, or name another file.")
        check_outputs({"--output": trace, "--html": arguments.html}, job_trace.files(arguments.directory).values())
        dumps = job_trace.read(arguments.directory)
        summary = job_summary.of(dumps, job_trace.waits(dumps))
        if trace is not None:
            trace.write_text(json.dumps(job_trace.trace(dumps)))
        if arguments.html is not None:
            title = f"Timeline of {arguments.directory.resolve().name}"
            arguments.html.write_text(timeline_page.page(dumps, title), encoding="utf-8")
    except (OSError, ValueError) as error:
        return failed("timeline", error)
    if arguments.json:
        print_json(summary)
        return 0
    files = ", ".join(str(path) for path in (trace, arguments.html) if path is not None)
    console().print(job_summary.table(summary))
    for line in (job_summary.headline(summary), job_summary.straggler_line(summary), f"written: {files}"):
        console().print(line, soft_wrap=True, highlight=False, markup=False)
    return 0
