"""The newest state of a run: the ranks of a new world agree on it, and send it to the ranks that lack it.

Parameters, optimizer, scheduler and position change together, without communication, after all ranks have contributed
to a step. A rank therefore has the state before a step or the state after it, and the states of two ranks at the same
position are equal.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.collective_ops import collectives
from mpicomm.errors import TrainingError, raised_on_all_ranks
from mpicomm.training import tensor_packing
from mpicomm.training.shard_replicas import Held
from mpicomm.training.state import Position
from mpicomm.watchdog import hang_report

Progress = tuple[int, ...]
"""Numbers that are greater at later points of a run."""

_numbers = itertools.count()


def next_trainer() -> int:
    """Return the number of the next trainer of this process, from 0."""
    return next(_numbers)


@dataclasses.dataclass(frozen=True)
class Failure:
    """Ranks that failed at one time."""

    ranks: tuple[int, ...]
    """Their ranks in the world that they were in."""

    hosts: tuple[str, ...]
    reason: str
    detected_at: float
    """As of `time.time()`."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """The recoveries between two steps."""

    failures: tuple[Failure, ...]
    joined: tuple[int, ...]
    """The ranks that spares have taken in the latest recovery."""

    size: int
    """The number of ranks that continue."""

    position: Position
    """A copy of the position at which they continue."""

    last_step_at: float
    """The time of the last step before, or of the first failure if no step was complete, as of `time.time()`."""

    def describe(self, gap: float) -> str:
        """Return the recovery in one line.

        Args:
            gap: The seconds without a complete step.
        """
        failed = "; ".join(
            f"{hang_report.called(each.ranks)} on {', '.join(sorted(set(each.hosts)))} failed: {each.reason}"
            for each in self.failures
        )
        joined = f", {len(self.joined)} of them spares" if self.joined else ""
        return (
            f"{failed}; continued from step {self.position.step} on {self.size} ranks{joined}, after {gap:.2f} s "
            f"without a step"
        )


@dataclasses.dataclass(frozen=True)
class Standing:
    """The part of the state of a run that a rank has."""

    trainer: int
    """The number of the trainer in the program."""

    progress: Progress | None
    """None on a rank without a state."""

    last_step_at: float | None = None
    """The time at which this rank completed its last step, as of `time.time()`."""

    failures: tuple[Failure, ...] = ()
    """The failures since its last step."""

    has_joined: bool = False
    """Whether the rank is a spare that has just joined."""

    held: tuple[Held, ...] = ()
    """The shards of a sharded model that this rank holds."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The result of the agreement: the rank that sends the newest state, and the ranks that lack it."""

    source: int
    """The lowest rank that has the newest state."""

    standing: Standing
    """Of the rank `source`."""

    ranks_without: tuple[int, ...]
    """The ranks that lack the newest state."""

    joined: tuple[int, ...]
    """The spares that have just joined."""

    held: Sequence[Sequence[Held]]
    """The shards of a sharded model that each rank holds."""

    def recovery(self, position: Position, size: int) -> Recovery | None:
        """Return the recovery since the last step; None if no rank has failed."""
        failures, at = self.standing.failures, self.standing.last_step_at
        if not failures:
            return None
        begun = failures[0].detected_at if at is None else at
        return Recovery(failures, self.joined, size, dataclasses.replace(position), begun)


def agree(mine: Standing) -> Agreement:
    """Agree on the newest state of all ranks (collective).

    Raises:
        TrainingError: On every rank, if a spare has joined in another trainer of the program.
    """
    return decide(collectives.all_gather_object(mine))


def decide(standings: Sequence[Standing]) -> Agreement:
    """Return the agreement from the standings of all ranks.

    If no rank has a state, the source is rank 0, whose parameters every new run takes over.

    Raises:
        TrainingError: If the ranks are in different trainers of the program.
    """
    numbers = sorted({each.trainer for each in standings})
    if len(numbers) > 1:
        raise raised_on_all_ranks(
            TrainingError(
                f"a spare joined in trainer {numbers[0] + 1} of the program while the other ranks were in trainer "
                f"{numbers[-1] + 1}.\n"
                f"Create one Trainer per program if the job has spares; several calls of fit() are possible."
            )
        )
    newest = max((each.progress for each in standings if each.progress is not None), default=None)
    source = next(rank for rank, each in enumerate(standings) if each.progress == newest)
    return Agreement(
        source,
        standings[source],
        tuple(
            rank
            for rank, each in enumerate(standings)
            if rank != source and (each.progress is None or each.progress != newest)
        ),
        tuple(rank for rank, each in enumerate(standings) if each.has_joined),
        [each.held for each in standings],
    )


def send(agreed: Agreement, collect: Callable[[], Any], load: Callable[[Any], None], device: torch.device) -> None:
    """Send the newest state to the ranks that lack it (collective).

    The state of a rank is replaced after the new one has arrived completely. Tensors are sent one by one, so that a
    rank that has the state already allocates memory for one tensor only.

    Args:
        agreed: The agreement.
        collect: Returns the state of this rank; called on the source.
        load: Loads a state; called on the ranks that lack it.
        device: The device of this rank.
    """
    if not agreed.ranks_without:
        return
    rank = dist.get_rank()
    packed, tensors = tensor_packing.pack(collect()) if rank == agreed.source else (b"", [])
    kinds = [(each.shape, each.dtype, each.device.type) for each in tensors]
    packed, kinds = collectives.broadcast_object((packed, kinds), src=agreed.source)
    lacks = rank in agreed.ranks_without
    received = []
    for number, (shape, dtype, kind) in enumerate(kinds):
        if rank == agreed.source:
            tensor = tensors[number].contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device if kind == device.type else kind)
        dist.broadcast(tensor, agreed.source)
        if lacks:
            received.append(tensor)
    if lacks:
        load(tensor_packing.unpack(packed, received))
