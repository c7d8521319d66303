"""Plots with matplotlib, written to files only: figures, and runs over the optimizer steps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpicomm.metrics_file import ENTRY_FIELDS, PARTS
from mpicomm.reports import runs as run_files
from mpicomm.reports.run_metrics import evaluation_metrics
from mpicomm.reports.runs import Run, percentages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 150
_INCHES_WIDE, _INCHES_OF_PANEL = 8.0, 3.0
_WINDOWS = 60  # of the training time, in each of which throughput and times are averaged
_EVALUATIONS = ("eval", "step_eval")
_STEP_FIELDS = {*ENTRY_FIELDS, "loss", "samples_per_s", "memory_mib", *(f"{part}_s" for part in PARTS)}
"""The fields of a step entry that have panels of their own, or none; the others are metrics."""
_TITLE_COLUMNS = 80


def new_figure(inches: tuple[float, float]) -> Figure:
    """Return an empty figure.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plotting requires matplotlib: {error}.\nInstall it: pip install matplotlib") from error
    # Without pyplot, which would select a matplotlib backend for the whole process and keep the figure alive.
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG file.

    Raises:
        OSError: If the file cannot be written.
    """
    try:
        figure.savefig(path, format="png", dpi=_DPI)
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"cannot write {path}: {why}.\nPass a file in a directory to which you can write.") from error


# -- runs --------------------------------------------------------------------------------------------------------------


def draw(runs: Sequence[Run]) -> Figure:
    """Return the figure of runs: panels with a common axis of optimizer steps.

    The panels are the loss, each metric of the runs, the throughput, and the times of rank 0 by part. Dotted lines mark
    resumes and recoveries.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    names = _metric_names(runs)
    figure = new_figure((_INCHES_WIDE, _INCHES_OF_PANEL * (3 + len(names))))
    panels = figure.subplots(3 + len(names), 1, sharex=True)
    losses, *of_metrics, throughput, times = panels
    _draw_losses(losses, runs)
    for axes, name in zip(of_metrics, names, strict=True):
        _draw_metric(axes, runs, name)
    _draw_throughput(throughput, runs)
    if len(runs) == 1:
        _draw_parts(times, runs[0])
    else:
        _draw_communication(times, runs)
    times.set_xlabel("optimizer step")
    for axes in panels:
        _draw_continuations(axes, runs)
        axes.grid(visible=True, alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    title = textwrap.fill(", ".join(run.name for run in runs), _TITLE_COLUMNS)
    figure.suptitle(title, parse_math=False)
    return figure


def _metric_names(runs: Sequence[Run]) -> list[str]:
    """Return the metrics of the step and evaluation entries, without a constant learning rate."""
    names: dict[str, None] = {}
    for run in runs:
        for entry in run.select("step"):
            names |= dict.fromkeys(
                name for name in entry.values.keys() - _STEP_FIELDS if entry.number(name) is not None
            )
        for entry in run.select(*_EVALUATIONS):
            names |= dict.fromkeys(evaluation_metrics(entry))
    rates = {value for run in runs for _, value in _points(run, ("step",), "lr")}
    constant = {"lr"} if len(rates) < 2 else set()
    return sorted(names.keys() - {"eval_loss"} - constant)


def _draw_metric(axes: Axes, runs: Sequence[Run], name: str) -> None:
    axes.set_ylabel(name.replace("$", r"\$"))
    for number, run in enumerate(runs):
        trained, evaluated = _points(run, ("step",), name), _points(run, _EVALUATIONS, name)
        if trained:
            _line(axes, trained, number, "-", _label("training", run, runs))
        if evaluated:
            colour = number if len(runs) > 1 else 1
            _line(axes, evaluated, colour, "o--", _label("evaluation", run, runs))


def _draw_continuations(axes: Axes, runs: Sequence[Run]) -> None:
    for number, run in enumerate(runs):
        colour = "0.3" if len(runs) == 1 else f"C{number}"
        drawn: set[str] = set()  # each kind has one entry in the legend
        for entry in run.select("resume", "recovery"):
            label = None if entry.event in drawn else _label(entry.event, run, runs)
            drawn.add(entry.event)
            style = ":" if entry.event == "resume" else "-."
            axes.axvline(entry.step, color=colour, linestyle=style, linewidth=1.2, label=label)


def _draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    axes.set_ylabel("loss")
    drawn: list[float] = []
    for number, run in enumerate(runs):
        trained, evaluated = _points(run, ("step",), "loss"), _points(run, _EVALUATIONS, "eval_loss")
        _line(axes, trained, number, "-", _label("training", run, runs))
        if evaluated:
            # One colour per run, or per curve of a single run.
            colour = number if len(runs) > 1 else 1
            _line(axes, evaluated, colour, "o--", _label("evaluation", run, runs))
        drawn += [value for _, value in (*trained, *evaluated)]
    if drawn and all(value > 0 for value in drawn):
        axes.set_yscale("log")


def _draw_throughput(axes: Axes, runs: Sequence[Run]) -> None:
    axes.set_ylabel("throughput (samples/s)")
    for number, run in enumerate(runs):
        windows = run_files.windows(run, _WINDOWS)
        points = [
            (window.step, window.samples / window.seconds) for window in windows if window.samples and window.seconds
        ]
        _line(axes, points, number, "-", _label("throughput", run, runs))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,g}")


def _draw_parts(axes: Axes, run: Run) -> None:
    axes.set_ylabel("rank 0's time (%)")
    axes.set_ylim(0, 100)
    shares = _shares(run)
    if shares:
        # Each window covers the steps before its last one, so the areas start at the first step of the run.
        steps = [run.entries[0].step, *[step for step, _ in shares]]
        stacks = [[parts[part] for parts in [shares[0][1], *[parts for _, parts in shares]]] for part in PARTS]
        axes.stackplot(steps, stacks, labels=PARTS, step="pre", alpha=0.8)


def _draw_communication(axes: Axes, runs: Sequence[Run]) -> None:
    axes.set_ylabel("communication (% of rank 0's time)")
    axes.set_ylim(0, 100)
    for number, run in enumerate(runs):
        points = [(step, parts["communication"]) for step, parts in _shares(run)]
        _line(axes, points, number, "-", _label("communication", run, runs))


def _shares(run: Run) -> list[tuple[int, dict[str, float]]]:
    """Return the last step and the percentages of the time by part, for each window with a time."""
    windows = run_files.windows(run, _WINDOWS)
    return [(window.step, shares) for window in windows if (shares := percentages(window.parts))]


def _points(run: Run, events: Sequence[str], name: str) -> list[tuple[int, float]]:
    return [(entry.step, value) for entry in run.select(*events) if (value := entry.number(name)) is not None]


def _line(axes: Axes, points: Sequence[tuple[int, float]], colour: int, style: str, label: str) -> None:
    steps, values = [step for step, _ in points], [value for _, value in points]
    visible = "o" if len(points) == 1 else style  # a line of one point would be invisible
    axes.plot(steps, values, visible, color=f"C{colour}", label=label, markersize=4)


def _label(curve: str, run: Run, runs: Sequence[Run]) -> str:
    """Return the legend of a curve. Dollars are escaped: matplotlib renders text between them as formulas."""
    return curve if len(runs) == 1 else f"{curve}, {run.name}".replace("$", r"\$")
