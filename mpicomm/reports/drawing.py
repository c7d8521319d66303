"""Figures with matplotlib, written to files only: requires no display."""

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
