"""Profiles of training steps with torch.profiler, as trace files for Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mpicomm import arguments
from mpicomm.arguments import Expected
from mpicomm.job.session import World

FOLDER = "profile"
"""The folder of the traces in the run directory."""

_STEPS = Expected(
    "a range of steps",
    lambda steps: isinstance(steps, range),
    "a range of consecutive steps from 1",
    lambda steps: len(steps) > 0 and steps.step == 1 and steps.start >= 1,
    "Pass for example profile=range(10, 13) for the steps 10, 11 and 12.",
).or_none()
_RANKS = arguments.instance("a sequence of ranks", Sequence, remedy="Pass for example profile_ranks=(0, 1).")
_RANK = arguments.integer(0)


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """Arguments of `Trainer` that concern profiles.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range, or steps are passed without checkpoint_dir.
    """

    steps: range | None
    ranks: Sequence[int]
    checkpoint_dir: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        _STEPS.check(self.steps, "profile")
        _RANKS.check(self.ranks, "profile_ranks")
        for rank in self.ranks:
            _RANK.check(rank, "a rank in profile_ranks")
        if self.steps is not None and self.checkpoint_dir is None:
            raise ValueError(
                "profile requires a checkpoint_dir, got checkpoint_dir=None.\n"
                "Pass checkpoint_dir, the directory of the traces, or omit profile."
            )


class StepProfiler:
    """Profiles a range of steps of this rank, each with the loading of its batches."""

    def __init__(self, steps: range, folder: Path, world: World) -> None:
        self._steps, self._folder, self._world = steps, folder, world
        self._profile: Any = None
        self._mark = contextlib.ExitStack()  # has the range of the current step in the trace
        self._first = 0

    def count(self, completed: int) -> None:
        """Start or end the profile, if the next step is its first one or follows its last one.

        Args:
            completed: The number of the run's completed steps.
        """
        if completed + 1 not in self._steps:
            self.close()
            return
        self._mark.close()
        if self._profile is None:
            self._start(completed + 1)
        self._mark.enter_context(torch.profiler.record_function(f"step {completed + 1}"))

    def close(self) -> None:
        """End the profile, if there is one, and write the trace."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self._mark.close()
        profile.stop()
        self._folder.mkdir(exist_ok=True)
        path = self._unused_path()
        temporary = path.with_suffix(".partial")
        profile.export_chrome_trace(str(temporary))
        temporary.rename(path)

    def _start(self, step: int) -> None:
        # without a list, torch records the CPU and the accelerator for which it was built
        activities = [torch.profiler.ProfilerActivity.CPU] if self._world.device.type == "cpu" else None
        self._first = step
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def _unused_path(self) -> Path:
        """Return the path of the trace. A resumed run may profile the same steps again, and keeps the first trace."""
        name = f"rank_{self._world.rank:03d}-step-{self._first:09d}"
        paths = (self._folder / f"{name}{f'-{number}' if number > 1 else ''}.json" for number in itertools.count(1))
        return next(path for path in paths if not path.exists())


@contextlib.contextmanager
def opened(
    options: ProfileOptions, directory: Path | None, world: World, completed: int
) -> Iterator[StepProfiler | None]:
    """Yield the profiler, if this rank profiles steps; at the end of the block it writes a trace that it has begun.

    Args:
        options: The steps and the ranks.
        directory: The directory of the run.
        world: The world of the run.
        completed: The number of steps from which the run continues.
    """
    if options.steps is None or directory is None or world.rank not in options.ranks:
        yield None
        return
    profiler = StepProfiler(options.steps, directory / FOLDER, world)
    with contextlib.closing(profiler):
        profiler.count(completed)
        yield profiler
