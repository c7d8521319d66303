"""Table of the figures of runs, with one column for each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from mpicomm import terminal
from mpicomm.metrics_file import PARTS
from mpicomm.reports.figures import Figures, RecoveryFigures


def table(runs: Sequence[Figures]) -> Table:
    """Return the table of some runs."""
    metrics = dict.fromkeys(name for each in runs for name in each.last_evaluation | each.best_evaluation)
    columns = [_column(each, list(metrics)) for each in runs]
    names = [each.run for each in runs]
    rows = [[row, *[column[row] for column in columns]] for row in columns[0]]
    return terminal.table(["", *names], rows, right=names, title="runs" if len(runs) > 1 else "run")


def shown_seconds(seconds: float) -> str:
    """Return a duration with its unit: `3.2 s`, `1:05 min` or `2:00:10 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{terminal.clock(seconds)} {'min' if round(seconds) < 3600 else 'h'}"


def _column(figures: Figures, metrics: Sequence[str]) -> dict[str, str]:
    """Return the cells of a run by row."""
    before = f" (previously {', '.join(map(str, figures.ranks_before))})" if figures.ranks_before else ""
    evaluations = {}
    for metric in metrics:
        best = figures.best_evaluation.get(metric)
        evaluations[f"{metric}, last"] = _known(figures.last_evaluation.get(metric), "{:.4g}")
        evaluations[f"{metric}, best"] = _known(best, "{0.value:.4g} ({0.which}, epoch {0.epoch})")
    return {
        "state": _state(figures),
        "ranks": _known(figures.ranks, f"{{}}{before}"),
        "resumes": str(figures.resumes),
        "recoveries": _recoveries(figures.recoveries),
        "epochs": str(figures.epochs),
        "steps": f"{figures.steps:,}",
        "samples": f"{figures.samples:,}",
        "training time": shown_seconds(figures.training_seconds),
        "samples/s": _known(figures.samples_per_s, "{:,.0f}"),
        "loss, last": _known(figures.last_loss, "{:.4g}"),
        **evaluations,
        **{f"time in {part}": _known(figures.time_percent.get(part), "{:.0f} %") for part in PARTS},
        "peak memory": _known(figures.peak_memory_mib, "{:,.0f} MiB"),
    }


def _recoveries(found: Sequence[RecoveryFigures]) -> str:
    """Return the recoveries of a run, one per line: the failed ranks, their hosts, and the time without a step."""
    lines = [
        f"rank{'s' if len(each.ranks) > 1 else ''} {', '.join(map(str, each.ranks))} on "
        f"{', '.join(sorted(set(each.hosts)))} after step {each.step}: {_known(each.gap_seconds, '{:.2f} s')}"
        for each in found
    ]
    return "\n".join(lines) or "0"


def _known(value: Any, form: str) -> str:
    """Return a value in a format, or a dash if it is unknown."""
    return "-" if value is None else form.format(value)


def _state(figures: Figures) -> str:
    if figures.state == "interrupted":
        return "interrupted or running"
    return figures.state if figures.why is None else f"{figures.state}: {figures.why}"
