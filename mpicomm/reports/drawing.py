"""Figures by matplotlib, into files, never on a screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 150


def new_figure(inches: tuple[float, float]) -> Figure:
    """Return an empty figure.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"a plot needs matplotlib: {error}.\nInstall it with: pip install matplotlib") from error
    # Not by pyplot, which would choose a back end for the whole process and keep the figure.
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure.

    Raises:
        OSError: If the file cannot be written.
    """
    try:
        figure.savefig(path, format="png", dpi=_DPI)
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"cannot write {path}: {why}.\nName a file in a directory that you may write to.") from error
