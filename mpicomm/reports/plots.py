"""Plots with matplotlib, written to files only: figures, and runs over the optimizer steps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpicomm.metrics_file import PARTS
from mpicomm.reports.runs import Run, percentages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 150
_INCHES = (8.0, 9.0)
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
    """Return the figure of runs: three panels with a common axis of optimizer steps.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure = new_figure(_INCHES)
    losses, throughput, times = figure.subplots(3, 1, sharex=True)
    _draw_losses(losses, runs)
    _draw_throughput(throughput, runs)
    if len(runs) == 1:
        _draw_parts(times, runs[0])
    else:
        _draw_communication(times, runs)
    times.set_xlabel("optimizer step")
    for axes in (losses, throughput, times):
        axes.grid(visible=True, alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.align_ylabels()
    title = textwrap.fill(", ".join(run.name for run in runs), _TITLE_COLUMNS)
    figure.suptitle(title, parse_math=False)
    return figure


def _draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    axes.set_ylabel("loss")
    drawn: list[float] = []
    for number, run in enumerate(runs):
        trained, evaluated = _points(run, "step", "loss"), _points(run, "eval", "eval_loss")
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
        points = [
            (entry.step, rate)
            for entry in run.select("step")
            if entry.samples and (rate := entry.number("samples_per_s")) is not None
        ]
        _line(axes, points, number, "-", _label("throughput", run, runs))
    axes.set_ylim(bottom=0)


def _draw_parts(axes: Axes, run: Run) -> None:
    axes.set_ylabel("rank 0's time (%)")
    axes.set_ylim(0, 100)
    shares = _shares(run)
    if shares:
        # Each entry covers the steps before it, so the areas start at the first step of the run.
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
    """Return the step and the percentages of the time by part, for each step entry with a time."""
    return [(entry.step, shares) for entry in run.select("step") if (shares := percentages(entry.parts))]


def _points(run: Run, event: str, name: str) -> list[tuple[int, float]]:
    return [(entry.step, value) for entry in run.select(event) if (value := entry.number(name)) is not None]


def _line(axes: Axes, points: Sequence[tuple[int, float]], colour: int, style: str, label: str) -> None:
    steps, values = [step for step, _ in points], [value for _, value in points]
    visible = "o" if len(points) == 1 else style  # a line of one point would be invisible
    axes.plot(steps, values, visible, color=f"C{colour}", label=label, markersize=4)


def _label(curve: str, run: Run, runs: Sequence[Run]) -> str:
    """Return the legend of a curve. Dollars are escaped: matplotlib renders text between them as formulas."""
    return curve if len(runs) == 1 else f"{curve}, {run.name}".replace("$", r"\$")
