"""Plots of benchmarks of collective operations: latency and bus bandwidth by size, one curve per backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicomm.reports import drawing
from mpicomm.reports.benchmarks import kind_of, shown_size, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES_WIDE, _INCHES_EACH = 10.0, 3.6
_TICKS = 8
_PANELS = (("us", "latency (us)"), ("busbw", "bus bandwidth (GB/s)"))


def check() -> None:
    """Check, before measuring, that plots are possible.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    drawing.new_figure((1.0, 1.0))


def save(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a plot of rows to a file, with two panels for each operation, dtype and placement (in or out of place).

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    drawing.save(draw(rows), path)


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the figure of the rows of `bench.sweep.measure`."""
    kinds = list(dict.fromkeys(map(kind_of, rows)))
    figure = drawing.new_figure((_INCHES_WIDE, _INCHES_EACH * max(1, len(kinds))))
    panels = figure.subplots(max(1, len(kinds)), len(_PANELS), squeeze=False)
    for kind, pair in zip(kinds, panels, strict=False):
        for axes, (figure_name, label) in zip(pair, _PANELS, strict=True):
            _draw(axes, [row for row in rows if kind_of(row) == kind], figure_name)
            axes.set_title(title_of(kind), fontsize="medium")
            axes.set_ylabel(label)
    return figure


def _draw(axes: Axes, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    for backend in dict.fromkeys(row["backend"] for row in rows):
        points = [(row["nbytes"], row[name]) for row in rows if row["backend"] == backend and row[name] > 0]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", label=backend, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row["nbytes"] for row in rows})
    ticks = sizes[:: max(1, -(-len(sizes) // _TICKS))]
    axes.set_xticks(ticks, [shown_size(size) for size in ticks], fontsize="small")
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size")
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
