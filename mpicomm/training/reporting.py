"""Reporting of a run on rank 0: one writer of metrics, whose sinks are the metrics file, the loggers and the terminal.

The terminal shows a live bar or plain lines, and a summary table at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mpicomm import agreement, arguments, metrics_file, rank_log, terminal
from mpicomm.arguments import FLAG
from mpicomm.collective_ops import collectives
from mpicomm.devices import accelerator
from mpicomm.errors import CheckpointError
from mpicomm.job.session import World
from mpicomm.metrics_file import MetricsFile
from mpicomm.training import loggers
from mpicomm.training.data import LoaderOptions
from mpicomm.training.loggers import Logger, LoggerArgument
from mpicomm.training.newest_state import Recovery
from mpicomm.training.state import Position
from mpicomm.training.step_metrics import StepTimer

STYLES = ("auto", "bar", "lines", "none")
_SHOW_SECONDS = 0.1  # between two updates of the bar: rendering it takes about a millisecond
_LINE_SECONDS = 5.0  # between two lines of progress
_WIDTH = 110  # characters of a line


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Arguments of `Trainer` that concern reporting.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If a name is unknown, or an argument requires checkpoint_dir.
        ImportError: If the package of a logger is not installed.
    """

    progress: str
    logger: LoggerArgument
    rank_logs: bool
    checkpoint_dir: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        loggers.check(self.logger, self.checkpoint_dir)
        arguments.one_of(*STYLES).check(self.progress, "progress")
        FLAG.check(self.rank_logs, "rank_logs")
        if self.rank_logs and self.checkpoint_dir is None:
            raise ValueError(
                "rank_logs=True requires a checkpoint_dir, got checkpoint_dir=None.\n"
                "Pass checkpoint_dir, the directory of the logs, or omit rank_logs."
            )


class Reporter:
    """Writes the metrics of a run: each entry to the metrics file and the loggers, lines of text to the terminal.

    Only `end` communicates with other ranks.
    """

    def __init__(self, world: World, sinks: Sequence[Logger], display: Display) -> None:
        """Start the clocks.

        Args:
            sinks: Functions that take each entry: of the metrics file and the loggers, on rank 0.
            display: Prints on rank 0.
        """
        self.timer = StepTimer(world.device)
        self._world, self._sinks, self._display = world, sinks, display
        self._begun = self._logged = time.monotonic()
        self._samples = 0  # of all ranks, since this process started
        self._samples_logged = 0
        self._logged_step = 0
        self._excluded = 0.0  # seconds without training, such as evaluations
        self._loss: float | None = None
        self._next_show = 0.0
        self._gpu_utilization: list[int] = []
        self._parts = dict.fromkeys(self.timer.parts, 0.0)
        self._recovery: Recovery | None = None  # until the next step is complete

    def write(self, event: str, position: Position, line: str = "", /, **values: Any) -> None:
        """Write an entry to the metrics file and the loggers, and a line, if any, to the terminal."""
        entry = {
            "event": event,
            "time": time.time(),
            "step": position.step,
            "epoch": position.epoch,
            "consumed": position.consumed,
            **values,
        }
        for sink in self._sinks:
            sink(entry)
        if line:
            self._display.print(line)

    def begin(self, position: Position, options: LoaderOptions, *, is_complete: bool) -> None:
        """Report the position at which the run starts or resumes, and start the clocks."""
        line = ""
        if position.step and not is_complete:
            line = (
                f"resuming from step {position.step}: epoch {position.epoch + 1}, {position.consumed} of its samples "
                f"completed"
            )
        job = {"ranks": self._world.size, "device": str(self._world.device)}
        self.write("resume" if position.step else "start", position, line, **job, **dataclasses.asdict(options))
        self._start_clocks(position)

    def begin_after(self, recovery: Recovery) -> None:
        """Report the position at which the run continues after ranks have failed, and start the clocks."""
        self._recovery = recovery
        self.write(
            "recovery",
            recovery.position,
            ranks=recovery.size,
            joined=list(recovery.joined),
            failures=[dataclasses.asdict(failure) for failure in recovery.failures],
        )
        self._start_clocks(recovery.position)

    def _start_clocks(self, position: Position) -> None:
        """Let the next step entry cover the time from now on, and the steps after a position."""
        self._begun = self._logged = time.monotonic()
        self._logged_step = position.step

    def end_recovery(self, position: Position) -> None:
        """Report the first step after a recovery, if there was one, and the time without a complete step."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            gap = time.time() - recovery.last_step_at
            self.write("recovered", position, recovery.describe(gap), gap_s=gap)

    def step(self, position: Position, count: int) -> None:
        """Count a step of `count` samples, and update the display at most every 0.1 s."""
        self._samples += count
        now = time.monotonic()
        if now >= self._next_show:
            self._next_show = now + _SHOW_SECONDS
            self._display.show(position.epoch, position.step, position.consumed, self._loss, self._rate())

    def log(
        self,
        position: Position,
        loss: float | None,
        optimizer: torch.optim.Optimizer,
        logged: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Write a step entry that covers the steps since the last one, with the values that the user has logged.

        At the end of an epoch there may be neither; then there is no entry.
        """
        has_steps = position.step != self._logged_step
        if not has_steps and loss is None and not logged:
            return
        now = time.monotonic()
        self._loss = self._loss if loss is None else loss
        parts = self.timer.reset()
        for name, part_seconds in parts.items():
            self._parts[name] += part_seconds
        seconds = max(now - self._logged, 1e-9)
        if self._world.device.type != "cpu" and (percent := accelerator.utilization(self._world.device)) is not None:
            self._gpu_utilization.append(percent)
        self.write(
            "step",
            position,
            loss=loss,
            lr=float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else None,
            samples_per_s=(self._samples - self._samples_logged) / seconds if has_steps else None,
            **{f"{name}_s": part_seconds for name, part_seconds in parts.items()},
            memory_mib=_memory(self._world.device) / 2**20,
            **logged,
        )
        self._logged, self._samples_logged, self._logged_step = now, self._samples, position.step

    def epoch(self, position: Position) -> None:
        """Report a complete epoch."""
        metrics = position.history[-1]
        self._display.show(position.epoch - 1, position.step, int(metrics["samples"]), self._loss, self._rate())
        line = _epoch_line(position) if position.is_evaluated else ""
        self.write("epoch", position, line, loss=metrics["loss"], samples=metrics["samples"])

    def evaluation(self, position: Position) -> None:
        """Report an evaluation after an epoch."""
        of_epoch = {"epoch", "step", "loss", "samples"}
        metrics = {name: value for name, value in position.history[-1].items() if name not in of_epoch}
        self.write("eval", position, _epoch_line(position), **metrics)

    def step_evaluation(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Report an evaluation within an epoch."""
        line = f"step {position.step}: {_format_metrics(metrics, {'eval_samples'})}"
        self.write("step_eval", position, line, **metrics)

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the time of a block from the samples per second."""
        before = time.monotonic()
        try:
            yield
        finally:
            duration = time.monotonic() - before
            self._excluded += duration
            self._logged += duration

    def end(self, position: Position) -> None:
        """Write the last entry and print the summary table of the run (collective)."""
        # 1. gather the metrics of all ranks
        self.end_recovery(position)
        seconds = time.monotonic() - self._begun
        utilization = self._gpu_utilization
        own = {
            "host": self._world.hostname,
            "device": str(self._world.device),
            "memory": _memory(self._world.device),
            "utilization": sum(utilization) // len(utilization) if utilization else None,
        }
        ranks = collectives.all_gather_object(own)
        line = ""
        if not self._samples:
            line = f"the run is complete: {position.epoch} epochs, {position.step} steps; training skipped."
        self.write("end", position, line, seconds=seconds, samples_per_s=self._rate(), ranks=ranks)
        # 2. print the table
        if self._samples:
            of_parts = sum(self._parts.values()) or 1.0
            rows = {
                "steps": f"{position.step:,} in {position.epoch} epochs",
                "time": f"{terminal.format_duration(seconds)} (evaluation {terminal.format_duration(self._excluded)})",
                "samples/s": f"{self._rate():,.0f} on {_format_ranks(self._world.size)}",
                "rank 0's steps": ", ".join(f"{value / of_parts:.0%} {name}" for name, value in self._parts.items()),
            }
            self._display.close()
            self._display.show_table(_summary(rows, ranks))

    def _rate(self) -> float:
        return self._samples / max(time.monotonic() - self._begun - self._excluded, 1e-9)


def _epoch_line(position: Position) -> str:
    return (
        f"epoch {position.epoch}: {_format_metrics(position.history[-1], {'epoch', 'step', 'samples', 'eval_samples'})}"
    )


def _format_metrics(metrics: Mapping[str, float], omitted: set[str]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name not in omitted)


@contextlib.contextmanager
def opened(
    world: World, directory: Path | None, options: ReportOptions, epochs: int | None, total: int | None, step: int
) -> Iterator[Reporter]:
    """Yield the reporter of a run; close its metrics file and display at the end of the block (collective on entry).

    Args:
        directory: The directory of the metrics file and the rank logs; None writes no files.
        total: The number of samples in an epoch, if known.
        step: The step from which the run continues.

    Raises:
        CheckpointError: On every rank, if rank 0 cannot write a file of the metrics, or another program wrote it.
    """
    prints = world.rank == 0
    path = directory / metrics_file.NAME if prints and directory is not None else None
    sinks: list[Logger] = []
    with contextlib.ExitStack() as stack:
        if options.rank_logs and directory is not None:
            stack.enter_context(rank_log.copy_output(rank_log.path_of(directory, world.rank)))

        def open_sinks() -> None:
            of_loggers = stack.enter_context(loggers.opened(options.logger if prints else None, directory, step))
            if path is not None:
                sinks.append(stack.enter_context(contextlib.closing(MetricsFile(path))).write)
            sinks.extend(of_loggers)

        def failed(rank: int, why: str) -> CheckpointError:
            return CheckpointError(
                f"rank {rank} cannot write metrics: {why}.\n"
                f"If this names a file, move it elsewhere, correct its permissions, or pass another checkpoint_dir."
            )

        agreement.run_on_all_ranks(collectives.all_gather_object, open_sinks, OSError, failed)
        display = stack.enter_context(contextlib.closing(Display(options.progress, epochs, total, prints=prints)))
        yield Reporter(world, sinks, display)


def _memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on the GPU, or resident in this process."""
    if device.type != "cpu":
        return accelerator.peak_memory(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- the terminal ------------------------------------------------------------------------------------------------------


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
        if not prints:
            style = "none"
        elif style == "auto":
            shows_bar = terminal.columns(sys.stdout) is not None and os.environ.get("TERM", "dumb") != "dumb"
            style = "bar" if shows_bar else "lines"
        self._style = style
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
        return f"  {terminal.format_duration(seconds)} left"

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


def _format_ranks(count: int) -> str:
    """Return `1 rank`, or `1,024 ranks`."""
    return "1 rank" if count == 1 else f"{count:,} ranks"


def _summary(rows: Mapping[str, str], ranks: Sequence[Mapping[str, Any]]) -> Table:
    """Return the summary table of a run.

    Args:
        rows: The first rows, by title.
        ranks: The host, device, peak memory in bytes and, if known, GPU utilization in percent of each rank.
    """
    table = Table(title="run", title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    by_host: dict[str, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        by_host.setdefault(rank["host"], []).append(rank)
    for host, host_ranks in by_host.items():
        memory = max(rank["memory"] for rank in host_ranks) / 2**20
        devices = sorted({rank["device"] for rank in host_ranks})
        text = f"{_format_ranks(len(host_ranks))} on {', '.join(devices)}, peak {memory:,.0f} MiB per rank"
        used = [rank["utilization"] for rank in host_ranks if rank["utilization"] is not None]
        if used:
            text += f", GPU utilization {min(used)} to {max(used)} %"
        table.add_row(host, text)
    return table
