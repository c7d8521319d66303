"""`mpicomm report`: the metrics of runs side by side, the results of benchmarks, and the waits in jobs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mpicomm.cli.argument_types import check_outputs, html, png
from mpicomm.cli.console import console, failed, print_json, print_message
from mpicomm.metrics_file import NAME, finite
from mpicomm.reports import benchmarks, html_report, job_summary, job_trace, plots, result_files, run_metrics, runs
from mpicomm.reports.html_report import Section

_Part: TypeAlias = tuple[Section, dict[Path, Any]]  # and the object for JSON of each path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="show the metrics of runs, benchmarks and jobs",
        description=f"Show the metrics of runs side by side, from the {NAME} that a Trainer writes to its "
        "checkpoint_dir, the results of benchmarks, and how long the ranks of jobs waited for each other.",
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", type=Path,
        help="a Trainer's checkpoint_dir, a file of `mpicomm bench --json`, or a directory below mpicomm-dumps",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="F.png", type=png, help="plot the runs to this file (needs matplotlib)")
    parser.add_argument("--html", metavar="F.html", type=html, help="write all tables and plots to this page")
    parser.add_argument("--json", action="store_true", help="print a JSON list with one object per PATH")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, and return the exit status."""
    try:
        check_outputs({"--plot": arguments.plot, "--html": arguments.html}, arguments.paths)
        parts = _parts(arguments.paths, arguments.plot, has_plots=arguments.html is not None)
        sections = [section for section, _ in parts]
        if arguments.html is not None:
            title = f"Report of {', '.join(section.title for section in sections)}"
            arguments.html.write_text(html_report.page(title, sections), encoding="utf-8")
    except (OSError, ValueError, ImportError) as error:
        return failed("report", error)
    has_names = len(sections) > 1
    for section in sections:
        for warning in section.warnings:
            print_message("report", f"warning: {section.title}: {warning}" if has_names else f"warning: {warning}")
    if arguments.json:
        values = {path: value for _, of_part in parts for path, value in of_part.items()}
        print_json([values[path] for path in arguments.paths])
        return 0
    for section in sections:
        _print_lines([f"{section.title}:"] if has_names else [])
        for table in section.tables:
            console().print(table)
        _print_lines(section.notes)
    return 0


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        console().print(line, soft_wrap=True, highlight=False, markup=False)


def _parts(paths: Sequence[Path], plot: Path | None, *, has_plots: bool) -> list[_Part]:
    results = [path for path in paths if path.is_file() and path.name != NAME]
    jobs = [path for path in paths if not (path / NAME).is_file() and job_trace.files(path)]
    directories = [path for path in paths if path not in (*results, *jobs)]
    parts = [_of_benchmark(path, has_plot=has_plots) for path in results] + [_of_job(path) for path in jobs]
    if directories:
        parts.insert(0, _of_runs(directories, plot, has_plot=has_plots))
    elif plot is not None:
        raise ValueError("--plot draws runs, and no PATH is the checkpoint_dir of a run.\nUse --html F.html.")
    return parts


def _of_runs(directories: Sequence[Path], plot: Path | None, *, has_plot: bool) -> _Part:
    measured_runs = runs.read_all(directories)
    shown = [run_metrics.compute(run) for run in measured_runs]
    figure = plots.draw(measured_runs) if has_plot or plot is not None else None
    if plot is not None and figure is not None:
        plots.save(figure, plot)
    warnings = [warning for metrics in shown for warning in metrics.warnings]
    title = ", ".join(run.name for run in measured_runs)
    section = Section(title, [run_metrics.table(shown)], warnings=warnings, figure=figure)
    return section, dict(zip(directories, map(run_metrics.as_json, shown), strict=True))


def _of_benchmark(path: Path, *, has_plot: bool) -> _Part:
    results = result_files.read_benchmark(path)
    figure = benchmarks.draw(results["rows"]) if has_plot and benchmarks.has_curves(results["rows"]) else None
    tables, notes = benchmarks.tables(results), benchmarks.notes(results)
    return Section(path.name, tables, notes, results.get("warnings") or (), figure), {path: finite(results)}


def _of_job(path: Path) -> _Part:
    dumps = job_trace.read(path)
    summary = job_summary.of(dumps, job_trace.waits(dumps))
    notes = [job_summary.headline(summary), job_summary.straggler_line(summary)]
    return Section(path.resolve().name, [job_summary.table(summary)], notes), {path: summary}
