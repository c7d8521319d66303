"""Table of the figures of runs, with one column for each run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from mpicomm import terminal
from mpicomm.reports.figures import Figures
from mpicomm.reports.runs import PARTS

_UNKNOWN = "-"


def table(runs: Sequence[Figures]) -> Table:
    """Return the table of some runs."""
    columns = [_column(each) for each in runs]
    rows = [[name, *[column.get(name, _UNKNOWN) for column in columns]] for name in _names(runs)]
    names = [each.run for each in runs]
    return terminal.table(["", *names], rows, right=names, title="runs" if len(runs) > 1 else "run")


def shown_seconds(seconds: float) -> str:
    """Return a duration with its unit: `3.2 s`, `1:05 min` or `2:00:10 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02} h" if hours else f"{minutes}:{left:02} min"


def _names(runs: Sequence[Figures]) -> list[str]:
    """Return the names of the rows of all runs in their order, with the metrics of evaluations in the middle."""
    metrics = dict.fromkeys(name for each in runs for name in each.last_evaluation | each.best_evaluation)
    of_metrics = [row for name in metrics for row in (_last(name), _best(name))]
    of_time = [_share(part) for part in PARTS]
    return [*_OF_ALL, *of_metrics, *of_time, _MEMORY]


_OF_ALL = ("state", "ranks", "resumes", "epochs", "steps", "samples", "training time", "samples/s", "loss, last")
_MEMORY = "peak memory"


def _last(metric: str) -> str:
    return f"{metric}, last"


def _best(metric: str) -> str:
    return f"{metric}, best"


def _share(part: str) -> str:
    return f"time in {part}"


def _column(figures: Figures) -> dict[str, str]:
    """Return the cells of a run by row; unknown figures are left out."""
    before = f" (previously {', '.join(map(str, figures.ranks_before))})" if figures.ranks_before else ""
    cells = {
        "state": _state(figures),
        "resumes": str(figures.resumes),
        "epochs": str(figures.epochs),
        "steps": f"{figures.steps:,}",
        "samples": f"{figures.samples:,}",
        "training time": shown_seconds(figures.training_seconds),
    }
    known = {
        "ranks": None if figures.ranks is None else f"{figures.ranks}{before}",
        "samples/s": None if figures.samples_per_s is None else f"{figures.samples_per_s:,.0f}",
        "loss, last": None if figures.last_loss is None else f"{figures.last_loss:.4g}",
        _MEMORY: None if figures.peak_memory_mib is None else f"{figures.peak_memory_mib:,.0f} MiB",
    }
    cells |= {name: text for name, text in known.items() if text is not None}
    cells |= {_last(name): f"{value:.4g}" for name, value in figures.last_evaluation.items()}
    for name, best in figures.best_evaluation.items():
        cells[_best(name)] = f"{best.value:.4g} ({best.which}, epoch {best.epoch})"
    return cells | {_share(part): f"{percent:.0f} %" for part, percent in figures.time_percent.items()}


def _state(figures: Figures) -> str:
    if figures.state == "interrupted":
        return "interrupted or running"
    return figures.state if figures.why is None else f"{figures.state}: {figures.why}"
