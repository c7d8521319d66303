"""Kills of ranks at chosen points of a training run: which rank of which world, and where.

World 0 is the one that the job starts with; each recovery makes the next one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import mpicomm
from mpicomm.job import recovery
from mpicomm.training import parallel, reporting
from mpicomm.training.run_directory import RunDirectory
from mpicomm.training.training_loop import TrainingLoop

RECOVERING = "during the recovery"
POINTS = (
    "at a random moment",
    "in a 64 MiB all_reduce",
    "in a barrier",
    "while a checkpoint is written",
    "before a checkpoint is marked",
    "in an evaluation",
    "before the first step",
    "before the model is wrapped",
    "after the last step",
    "after fit",
)
"""Where a rank kills itself. "during the recovery" is for a second rank, after another one has been killed."""

_LARGE = 2**24  # float32 values of 64 MiB
_LONGEST = 0.4  # seconds from the first step of a world to a kill at a random moment
_AFTER = 0.15  # the same, in seconds, from the detection of a failure to a kill during the recovery


@dataclasses.dataclass(frozen=True)
class Kill:
    """The kill of one rank."""

    world: int
    rank: int
    """The rank in that world."""

    point: str
    number: int = 1
    """At which visit of the point; counted in each process, from its start in this world."""

    delay: float = 0.0
    """Seconds from the point to the kill, which another thread does."""


def to_text(kills: Sequence[Kill]) -> str:
    return json.dumps([dataclasses.asdict(each) for each in kills])


def from_text(text: str) -> list[Kill]:
    return [Kill(**each) for each in json.loads(text)]


def drawn(chance: random.Random, points: Sequence[str], worlds: Sequence[int]) -> list[Kill]:
    """Return one kill at each of the points, in consecutive worlds, of random ranks at random visits.

    Args:
        worlds: The number of ranks in each world.
    """
    return [kill_at(chance, point, world, chance.randrange(worlds[world])) for world, point in enumerate(points)]


def kill_at(chance: random.Random, point: str, world: int, rank: int) -> Kill:
    """Return the kill of a rank at a point, at a random visit."""
    if point in ("at a random moment", RECOVERING):
        return Kill(world, rank, point, 1, chance.uniform(0.0, _AFTER if point == RECOVERING else _LONGEST))
    if point in ("in a 64 MiB all_reduce", "in a barrier"):
        return Kill(world, rank, point, chance.randint(2, 4), chance.uniform(0.0, 0.03))
    if point == "while a checkpoint is written":
        return Kill(world, rank, point, chance.randint(1, 2), chance.uniform(0.0, 0.004))
    if point == "before a checkpoint is marked":
        return Kill(world, 0, point, chance.randint(1, 2))
    if point == "in an evaluation":
        return Kill(world, rank, point, chance.randint(1, 4))
    return Kill(world, rank, point)


class Plan:
    """The kills of a job, in the process of one rank."""

    def __init__(self, kills: Sequence[Kill], directory: Path) -> None:
        """Prepare the kills.

        Args:
            directory: Each killed process writes the time of its end there.
        """
        self._kills = kills
        self._directory = directory
        self._visits: dict[tuple[int, str], int] = {}

    def visit(self, point: str) -> None:
        """Kill this process if the plan has a kill of it here."""
        world = mpicomm.current_world()
        place = (world.recoveries, point)
        self._visits[place] = self._visits.get(place, 0) + 1
        for kill in self._kills:
            where = (kill.world, kill.rank, kill.point, kill.number)
            if where == (world.recoveries, world.rank, point, self._visits[place]):
                self._do(kill, world.recoveries)

    def points_of(self, point: str) -> bool:
        """Return whether any rank of this world is to be killed at a point."""
        world = mpicomm.current_world().recoveries
        return any((each.world, each.point) == (world, point) for each in self._kills)

    def _do(self, kill: Kill, world: int) -> None:
        def end() -> None:
            about = {"time": time.time(), "world": world, "rank": kill.rank, "point": kill.point}
            Path(self._directory, f"kill-{os.getpid()}.json").write_text(json.dumps(about))
            os.kill(os.getpid(), signal.SIGKILL)

        if kill.delay:
            timer = threading.Timer(kill.delay, end)
            timer.daemon = True
            timer.start()
        else:
            end()

    def install(self) -> None:
        """Call `visit` at the points of the package."""
        before(TrainingLoop, "_take_step", lambda *_: self._in_a_step())
        before(dcp.FileSystemWriter, "write_data", lambda *_: self.visit("while a checkpoint is written"))
        before(RunDirectory, "_mark", lambda *_: self.visit("before a checkpoint is marked"))
        before(parallel, "wrap", lambda *_, **__: self.visit("before the model is wrapped"))
        before(reporting.Reporter, "end", lambda *_: self.visit("after the last step"))
        before(recovery, "recover", lambda *_: self.visit(RECOVERING))

    def _in_a_step(self) -> None:
        self.visit("before the first step")
        self.visit("at a random moment")
        if self.points_of("in a 64 MiB all_reduce"):
            data = torch.ones(_LARGE)
            self.visit("in a 64 MiB all_reduce")
            dist.all_reduce(data)
        if self.points_of("in a barrier"):
            self.visit("in a barrier")
            time.sleep(0.02 * (mpicomm.current_world().rank % 2))  # so that some ranks wait in it
            dist.barrier()


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Call a function before each call of a method."""
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def killed(directory: Path) -> Iterator[dict[str, Any]]:
    """Return what the killed processes wrote before their end, in the order of time."""
    found = [json.loads(path.read_text()) for path in directory.glob("kill-*.json")]
    yield from sorted(found, key=lambda each: each["time"])
