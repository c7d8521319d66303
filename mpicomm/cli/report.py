"""`mpicomm report`: metrics and plots of one run, or of several runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpicomm.cli.argument_types import png
from mpicomm.cli.console import console, failed, print_json, print_message
from mpicomm.metrics_file import NAME
from mpicomm.reports import html_report, plots, run_metrics, runs


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="show the metrics of runs",
        description=f"Show the metrics of runs, from the {NAME} that a Trainer writes to its checkpoint_dir.",
    )
    parser.add_argument("directories", metavar="RUN_DIR", nargs="+", type=Path, help="a Trainer's checkpoint_dir")
    parser.add_argument("--plot", metavar="F.png", type=png, help="plot the runs to this file (needs matplotlib)")
    parser.add_argument("--html", metavar="F.html", type=Path, help="write the metrics and the plot to this page")
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON, a list with one object per run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, and return the exit status."""
    try:
        measured_runs = runs.read_all(arguments.directories)
        shown = [run_metrics.compute(run) for run in measured_runs]
        if arguments.plot is not None:
            plots.save(plots.draw(measured_runs), arguments.plot)
        if arguments.html is not None:
            warnings = [warning for metrics in shown for warning in metrics.warnings]
            title = f"Report of {', '.join(run.name for run in measured_runs)}"
            page = html_report.page(title, [run_metrics.table(shown)], warnings, plots.draw(measured_runs))
            arguments.html.write_text(page, encoding="utf-8")
    except (OSError, ImportError) as error:
        return failed("report", error)
    for warning in (warning for metrics in shown for warning in metrics.warnings):
        print_message("report", f"warning: {warning}")
    if arguments.json:
        print_json([run_metrics.as_json(metrics) for metrics in shown])
    else:
        console().print(run_metrics.table(shown))
    return 0
