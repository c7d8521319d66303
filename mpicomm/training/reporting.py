"""What is told of a run, on rank 0: the metrics file, the display and the table at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mpicomm import arguments
from mpicomm.arguments import FLAG, Expected
from mpicomm.collective_ops import collectives
from mpicomm.runtime import World
from mpicomm.training import progress_display
from mpicomm.training.data import LoaderOptions
from mpicomm.training.metrics import FILE, Journal, tensorboard
from mpicomm.training.progress_display import Display, shown_seconds
from mpicomm.training.state import Position
from mpicomm.training.step_timing import Clock

Logger = Callable[[dict[str, Any]], None]
_SHOW_SECONDS = 0.1


_LOGGER = Expected(
    "a function or 'tensorboard'",
    lambda logger: isinstance(logger, str) or callable(logger),
    is_within=lambda logger: not isinstance(logger, str) or logger == "tensorboard",
    remedy="Pass a function of an entry (a dict), or leave logger out.",
).or_none()


def check_arguments(progress: str, logger: Logger | str | None, *, rank_logs: bool, checkpoint_dir: object) -> None:
    """Refuse what means nothing.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If a name is unknown, or there is no directory for the logs.
        ImportError: If TensorBoard is asked for, and not installed.
    """
    _LOGGER.check(logger, "logger")
    if logger == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise ImportError('logger="tensorboard" needs TensorBoard.\nInstall it: pip install tensorboard')
    arguments.one_of(*progress_display.STYLES).check(progress, "progress")
    FLAG.check(rank_logs, "rank_logs")
    if rank_logs and checkpoint_dir is None:
        raise ValueError("rank_logs are written to checkpoint_dir, and there is none.\nGive one.")


class Reporter:
    """Tells how a run gets on. What it needs of other ranks it asks for at the end alone."""

    def __init__(self, world: World, journal: Journal, display: Display) -> None:
        self.clock = Clock(world.device)
        self._world, self._journal, self._display = world, journal, display
        self._begun = self._logged = time.monotonic()
        self._samples = 0  # in this process's time
        self._samples_logged = 0
        self._aside = 0.0  # seconds in which nothing was trained
        self._loss: float | None = None
        self._next_show = 0.0
        self._busy: list[int] = []
        self._parts = dict.fromkeys(self.clock.parts, 0.0)

    def begin(self, position: Position, options: LoaderOptions, *, is_complete: bool) -> None:
        """Tell where the run starts, and set the clocks."""
        about = {"ranks": self._world.size, "device": str(self._world.device), **dataclasses.asdict(options)}
        self.note("resume" if position.step else "start", position, **about)
        if position.step and not is_complete:
            where = f"epoch {position.epoch + 1}, {position.consumed} samples of it done"
            self.say(f"going on from step {position.step}: {where}")
        self._begun = self._logged = time.monotonic()

    def note(self, event: str, position: Position, **values: Any) -> None:
        """Write an entry."""
        about = {"time": time.time(), "step": position.step, "epoch": position.epoch, "consumed": position.consumed}
        self._journal.write(event, **about, **values)

    def say(self, text: str) -> None:
        """Print a line."""
        self._display.say(text)

    def step(self, position: Position, count: int) -> None:
        """Count a step, and show it now and then."""
        self._samples += count
        now = time.monotonic()
        if now >= self._next_show:
            self._next_show = now + _SHOW_SECONDS
            self._display.show(position.epoch, position.step, position.consumed, self._loss, self._rate())

    def log(self, position: Position, loss: float | None, optimizer: torch.optim.Optimizer) -> None:
        """Write what has happened since the last time."""
        now = time.monotonic()
        self._loss = self._loss if loss is None else loss
        parts = self.clock.take()
        for name, seconds in parts.items():
            self._parts[name] += seconds
        seconds = max(now - self._logged, 1e-9)
        self._busy += _utilization(self._world.device)
        self.note(
            "step",
            position,
            loss=loss,
            lr=float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else None,
            samples_per_s=(self._samples - self._samples_logged) / seconds,
            **{f"{name}_s": value for name, value in parts.items()},
            memory_mib=_memory(self._world.device) / 2**20,
        )
        self._logged, self._samples_logged = now, self._samples

    def epoch(self, position: Position) -> None:
        """Tell of an epoch that is complete."""
        figures = position.history[-1]
        self._display.show(position.epoch - 1, position.step, int(figures["samples"]), self._loss, self._rate())
        self.note("epoch", position, loss=figures["loss"], samples=figures["samples"])
        if position.is_evaluated:
            self._say_epoch(position)

    def evaluation(self, position: Position) -> None:
        """Tell of an evaluation."""
        names = {"epoch", "step", "loss", "samples"}
        self.note("eval", position, **{k: v for k, v in position.history[-1].items() if k not in names})
        self._say_epoch(position)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the time of a block out of the samples per second."""
        before = time.monotonic()
        try:
            yield
        finally:
            gone = time.monotonic() - before
            self._aside += gone
            self._logged += gone

    def end(self, position: Position) -> None:
        """Print the table of the run (collective)."""
        seconds = time.monotonic() - self._begun
        mine = {
            "host": self._world.hostname,
            "device": str(self._world.device),
            "memory": _memory(self._world.device),
            "utilization": sum(self._busy) // len(self._busy) if self._busy else None,
        }
        everybodys = collectives.all_gather_object(mine)
        self.note("end", position, seconds=seconds, samples_per_s=self._rate(), ranks=everybodys)
        if not self._samples:
            self.say(f"the run is complete: {position.epoch} epochs, {position.step} steps. Nothing was left to do.")
            return
        parts = sum(self._parts.values()) or 1.0
        shown = {
            "steps": f"{position.step:,} in {position.epoch} epochs",
            "time": f"{shown_seconds(seconds)}, of it evaluation {shown_seconds(self._aside)}",
            "samples/s": f"{self._rate():,.0f} on {progress_display.shown_ranks(self._world.size)}",
            "rank 0's steps": ", ".join(f"{value / parts:.0%} {name}" for name, value in self._parts.items()),
        }
        self._display.close()
        self._display.show_table(progress_display.summary(shown, everybodys))

    def _say_epoch(self, position: Position) -> None:
        known = {"epoch", "step", "samples", "eval_samples"}
        figures = "  ".join(f"{k} {v:.4f}" for k, v in position.history[-1].items() if k not in known)
        self.say(f"epoch {position.epoch}: {figures}")

    def _rate(self) -> float:
        return self._samples / max(time.monotonic() - self._begun - self._aside, 1e-9)


@contextlib.contextmanager
def opened(
    world: World,
    directory: Path | None,
    progress: str,
    logger: Logger | str | None,
    rank_logs: bool,
    epochs: int,
    total: int | None,
) -> Iterator[Reporter]:
    """Open what is reported to.

    Args:
        directory: Where files go; None for no files.
        total: The number of samples in an epoch, if it is known.
    """
    speaks = world.rank == 0
    log = directory / f"rank_{world.rank:03d}.log" if rank_logs and directory is not None else None
    file = directory / FILE if speaks and directory is not None else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress_display.rank_log(log))
        if logger == "tensorboard" and speaks:
            logger = stack.enter_context(tensorboard(directory or Path("runs")))
        journal = Journal(file, logger if speaks and callable(logger) else None)
        display = Display(progress, epochs, total, speaks=speaks)
        try:
            yield Reporter(world, journal, display)
        finally:
            display.close()
            journal.close()


def silent(world: World) -> Reporter:
    """Return a reporter that tells nobody."""
    return Reporter(world, Journal(None, None), Display("none", 1, None, speaks=False))


def _memory(device: torch.device) -> int:
    """Return the most bytes in use so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _utilization(device: torch.device) -> list[int]:
    """Return how busy the GPU is, in percent, if that can be known (nvidia-ml-py)."""
    if device.type != "cuda":
        return []
    try:
        return [torch.cuda.utilization(device)]
    except Exception:  # noqa: BLE001  torch raises many kinds where NVML is missing
        return []
