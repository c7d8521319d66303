"""Reporting of a run on rank 0: the metrics file, the progress display and the summary table."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mpicomm import agreement, arguments, durations, metrics_file, rank_log
from mpicomm.arguments import FLAG
from mpicomm.collective_ops import collectives
from mpicomm.errors import CheckpointError
from mpicomm.metrics_file import MetricsFile
from mpicomm.session import World
from mpicomm.training import loggers, progress_display
from mpicomm.training.data import LoaderOptions
from mpicomm.training.loggers import LoggerArgument
from mpicomm.training.newest_state import Recovery
from mpicomm.training.progress_display import Display
from mpicomm.training.state import Position
from mpicomm.training.step_metrics import Clock

_SHOW_SECONDS = 0.1


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
        arguments.one_of(*progress_display.STYLES).check(self.progress, "progress")
        FLAG.check(self.rank_logs, "rank_logs")
        if self.rank_logs and self.checkpoint_dir is None:
            raise ValueError(
                "rank_logs=True requires a checkpoint_dir, got checkpoint_dir=None.\n"
                "Pass checkpoint_dir, the directory of the logs, or omit rank_logs."
            )


class Reporter:
    """Writes the progress of a run to the metrics file and the display. Only `end` communicates with other ranks."""

    def __init__(self, world: World, file: MetricsFile, display: Display) -> None:
        self.clock = Clock(world.device)
        self._world, self._file, self._display = world, file, display
        self._begun = self._logged = time.monotonic()
        self._samples = 0  # of all ranks, since this process started
        self._samples_logged = 0
        self._excluded = 0.0  # seconds without training, such as evaluations
        self._loss: float | None = None
        self._next_show = 0.0
        self._gpu_utilization: list[int] = []
        self._parts = dict.fromkeys(self.clock.parts, 0.0)
        self._recovery: Recovery | None = None  # until the next step is complete

    def begin(self, position: Position, options: LoaderOptions, *, is_complete: bool) -> None:
        """Report the position at which the run starts or resumes, and start the clocks."""
        about = {"ranks": self._world.size, "device": str(self._world.device), **dataclasses.asdict(options)}
        self.write("resume" if position.step else "start", position, **about)
        if position.step and not is_complete:
            where = f"epoch {position.epoch + 1}, {position.consumed} of its samples completed"
            self.print(f"resuming from step {position.step}: {where}")
        self._begun = self._logged = time.monotonic()

    def begin_after(self, recovery: Recovery) -> None:
        """Report the position at which the run continues after ranks have failed, and start the clocks."""
        self._recovery = recovery
        self.write(
            "recovery",
            recovery.position,
            ranks=recovery.size,
            joined=list(recovery.joined),
            failures=[dataclasses.asdict(each) for each in recovery.failures],
        )
        self._begun = self._logged = time.monotonic()

    def end_recovery(self, position: Position) -> None:
        """Report the first step after a recovery, if there was one, and the time without a complete step."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            gap = time.time() - recovery.last_step_at
            self.write("recovered", position, gap_s=gap)
            self.print(recovery.describe(gap))

    def write(self, event: str, position: Position, **values: Any) -> None:
        """Write an entry to the metrics file and the logger."""
        about = {"time": time.time(), "step": position.step, "epoch": position.epoch, "consumed": position.consumed}
        self._file.write(event, **about, **values)

    def print(self, text: str) -> None:
        """Print a line on rank 0."""
        self._display.print(text)

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
        """Write a step entry that covers the steps since the last one, with the values that the user has logged."""
        now = time.monotonic()
        self._loss = self._loss if loss is None else loss
        parts = self.clock.reset()
        for name, seconds in parts.items():
            self._parts[name] += seconds
        seconds = max(now - self._logged, 1e-9)
        self._gpu_utilization += _utilization(self._world.device)
        self.write(
            "step",
            position,
            loss=loss,
            lr=float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else None,
            samples_per_s=(self._samples - self._samples_logged) / seconds,
            **{f"{name}_s": value for name, value in parts.items()},
            memory_mib=_memory(self._world.device) / 2**20,
            **logged,
        )
        self._logged, self._samples_logged = now, self._samples

    def epoch(self, position: Position) -> None:
        """Report a complete epoch."""
        figures = position.history[-1]
        self._display.show(position.epoch - 1, position.step, int(figures["samples"]), self._loss, self._rate())
        self.write("epoch", position, loss=figures["loss"], samples=figures["samples"])
        if position.is_evaluated:
            self._print_epoch(position)

    def evaluation(self, position: Position) -> None:
        """Report an evaluation."""
        names = {"epoch", "step", "loss", "samples"}
        self.write("eval", position, **{k: v for k, v in position.history[-1].items() if k not in names})
        self._print_epoch(position)

    def step_evaluation(self, position: Position, figures: Mapping[str, float]) -> None:
        """Report an evaluation within an epoch."""
        self.write("step_eval", position, **figures)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items() if name != "eval_samples")
        self.print(f"step {position.step}: {shown}")

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
        # 1. gather the figures of all ranks
        self.end_recovery(position)
        seconds = time.monotonic() - self._begun
        mine = {
            "host": self._world.hostname,
            "device": str(self._world.device),
            "memory": _memory(self._world.device),
            "utilization": sum(self._gpu_utilization) // len(self._gpu_utilization) if self._gpu_utilization else None,
        }
        gathered = collectives.all_gather_object(mine)
        self.write("end", position, seconds=seconds, samples_per_s=self._rate(), ranks=gathered)
        if not self._samples:
            self.print(f"the run is complete: {position.epoch} epochs, {position.step} steps; training skipped.")
            return
        # 2. print the table
        parts = sum(self._parts.values()) or 1.0
        shown = {
            "steps": f"{position.step:,} in {position.epoch} epochs",
            "time": f"{durations.clock(seconds)} (evaluation {durations.clock(self._excluded)})",
            "samples/s": f"{self._rate():,.0f} on {progress_display.shown_ranks(self._world.size)}",
            "rank 0's steps": ", ".join(f"{value / parts:.0%} {name}" for name, value in self._parts.items()),
        }
        self._display.close()
        self._display.show_table(progress_display.summary(shown, gathered))

    def _print_epoch(self, position: Position) -> None:
        known = {"epoch", "step", "samples", "eval_samples"}
        figures = "  ".join(f"{k} {v:.4f}" for k, v in position.history[-1].items() if k not in known)
        self.print(f"epoch {position.epoch}: {figures}")

    def _rate(self) -> float:
        return self._samples / max(time.monotonic() - self._begun - self._excluded, 1e-9)


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
    metrics = []
    with contextlib.ExitStack() as stack:
        if options.rank_logs and directory is not None:
            stack.enter_context(rank_log.copy_output(rank_log.path_of(directory, world.rank)))

        def open_metrics() -> None:
            logger = stack.enter_context(loggers.opened(options.logger if prints else None, directory, step))
            metrics.append(stack.enter_context(contextlib.closing(MetricsFile(path, logger))))

        agreement.run_on_all_ranks(collectives.all_gather_object, open_metrics, OSError, _unusable)
        display = stack.enter_context(contextlib.closing(Display(options.progress, epochs, total, prints=prints)))
        yield Reporter(world, metrics[0], display)


def _unusable(rank: int, why: str) -> CheckpointError:
    return CheckpointError(
        f"rank {rank} cannot write metrics: {why}.\n"
        f"If this names a file, move it elsewhere, correct its permissions, or pass another checkpoint_dir."
    )


def _memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _utilization(device: torch.device) -> list[int]:
    """Return the GPU utilization in percent, if available (requires nvidia-ml-py)."""
    if device.type != "cuda":
        return []
    try:
        return [torch.cuda.utilization(device)]
    except Exception:  # noqa: BLE001  torch raises exceptions of many types where NVML is missing
        return []
