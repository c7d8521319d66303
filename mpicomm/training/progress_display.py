"""Progress display of a run on rank 0: a live bar on a terminal, plain lines elsewhere, and a summary table."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mpicomm import terminal

STYLES = ("auto", "bar", "lines", "none")
_LINE_SECONDS = 5.0
_WIDTH = 110


class Display:
    """The progress display of a run: a bar, lines or nothing."""

    def __init__(self, style: str, epochs: int | None, total: int | None, *, prints: bool) -> None:
        """Start the display.

        Args:
            style: "bar", "lines" or "none"; "auto" is a bar on a terminal and lines elsewhere.
            epochs: The number of epochs of the run, if known.
            total: The number of samples in an epoch, if known.
            prints: Whether this rank prints anything.
        """
        self._total = total
        self._samples = None if epochs is None or total is None else epochs * total
        self._of_epochs = "" if epochs is None else f"/{epochs}"
        self._style = ("none" if not prints else _find_style()) if style == "auto" or not prints else style
        self._console = Console(quiet=True) if self._style == "none" else terminal.console(width=_WIDTH)
        self._bar: Progress | None = None
        self._line_at = 0.0
        if self._style == "bar":
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=self._console,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.start()
            self._bar.add_task("", total=self._samples, text="")

    def show(self, epoch: int, step: int, consumed: int, loss: float | None, rate: float) -> None:
        """Update the bar, or print a line at most every 5 s.

        Args:
            epoch: The number of complete epochs.
            step: The number of optimizer steps so far.
            consumed: Samples of this epoch that all ranks have taken.
            loss: The mean loss at the last reduction, if any.
            rate: Samples per second of the whole job.
        """
        text = f"step {step}  loss {'-' if loss is None else format(loss, '.4f')}  {rate:,.0f} samples/s"
        if self._bar is not None:
            done = epoch * (self._total or 0) + consumed
            name = f"epoch {epoch + 1}{self._of_epochs}"
            self._bar.update(self._bar.task_ids[0], completed=done, description=name, text=text)
        elif self._style == "lines" and time.monotonic() >= self._line_at + _LINE_SECONDS:
            self._line_at = time.monotonic()
            part = "" if not self._total else f"  {consumed / self._total:4.0%}{self._left(epoch, consumed, rate)}"
            self.print(f"epoch {epoch + 1}{self._of_epochs}  {text}{part}")

    def _left(self, epoch: int, consumed: int, rate: float) -> str:
        if self._samples is None:
            return ""
        seconds = (self._samples - epoch * (self._total or 0) - consumed) / max(rate, 1e-9)
        return f"  {terminal.clock(seconds)} left"

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show_table(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def close(self) -> None:
        """Stop the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _find_style() -> str:
    shows = terminal.columns(sys.stdout) is not None
    return "bar" if shows and os.environ.get("TERM", "dumb") != "dumb" else "lines"


def shown_ranks(count: int) -> str:
    """Return `1 rank`, or `1,024 ranks`."""
    return "1 rank" if count == 1 else f"{count:,} ranks"


def summary(figures: Mapping[str, str], ranks: Sequence[Mapping[str, Any]]) -> Table:
    """Return the summary table of a run.

    Args:
        figures: The first rows, by title.
        ranks: The host, device, peak memory in bytes and, if known, GPU utilization in percent of each rank.
    """
    table = Table(title="run", title_justify="left", show_header=False)
    for name, value in figures.items():
        table.add_row(name, value)
    by_host: dict[str, list[Mapping[str, Any]]] = {}
    for each in ranks:
        by_host.setdefault(each["host"], []).append(each)
    for host, those in by_host.items():
        memory = max(each["memory"] for each in those) / 2**20
        devices = sorted({each["device"] for each in those})
        text = f"{shown_ranks(len(those))} on {', '.join(devices)}, peak {memory:,.0f} MiB per rank"
        used = [each["utilization"] for each in those if each["utilization"] is not None]
        if used:
            text += f", GPU utilization {min(used)} to {max(used)} %"
        table.add_row(host, text)
    return table
