"""The newest state of a run after ranks have failed: the rank that has it, and its transfer to the other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.collective_ops import collectives
from mpicomm.errors import TrainingError, raised_on_all_ranks
from mpicomm.recorder import rank_text
from mpicomm.training import checkpoint, parallel
from mpicomm.training.shard_replicas import HeldShards
from mpicomm.training.state import Position

Progress = tuple[int, ...]
"""Numbers that are greater at later points of a run."""


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
            f"{rank_text.name_ranks(failure.ranks)} on {', '.join(sorted(set(failure.hosts)))} failed: {failure.reason}"
            for failure in self.failures
        )
        joined = f", {len(self.joined)} of them spares" if self.joined else ""
        return (
            f"{failed}; continued from step {self.position.step} on {self.size} ranks{joined}, after {gap:.2f} s "
            f"without a step"
        )


@dataclasses.dataclass(frozen=True)
class RankState:
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

    held: tuple[HeldShards, ...] = ()
    """The shards of a sharded model that this rank holds."""


@dataclasses.dataclass(frozen=True)
class NewestState:
    """The states of all ranks: which rank sends the newest one, and which lack it."""

    rank_states: Sequence[RankState]
    source: int
    """The lowest rank that has the newest state."""

    @property
    def ranks_without(self) -> tuple[int, ...]:
        """The ranks that lack the newest state. A rank without any lacks it also if no rank has one."""
        newest = self.rank_states[self.source].progress
        return tuple(
            rank
            for rank, rank_state in enumerate(self.rank_states)
            if rank != self.source and (rank_state.progress is None or rank_state.progress != newest)
        )

    @property
    def joined(self) -> tuple[int, ...]:
        """The spares that have just joined."""
        return tuple(rank for rank, rank_state in enumerate(self.rank_states) if rank_state.has_joined)

    def recovery(self, position: Position, size: int) -> Recovery | None:
        """Return the recovery since the last step; None if no rank has failed."""
        source = self.rank_states[self.source]
        if not source.failures:
            return None
        last_step_at = source.failures[0].detected_at if source.last_step_at is None else source.last_step_at
        return Recovery(source.failures, self.joined, size, dataclasses.replace(position), last_step_at)


def find(rank_states: Sequence[RankState]) -> NewestState:
    """Find the newest of the states of all ranks.

    If no rank has a state, the source is rank 0, whose parameters every new run takes over.

    Raises:
        TrainingError: On every rank, if a spare has joined in another trainer of the program.
    """
    numbers = sorted({rank_state.trainer for rank_state in rank_states})
    if len(numbers) > 1:
        raise raised_on_all_ranks(
            TrainingError(
                f"a spare joined in trainer {numbers[0] + 1} of the program while the other ranks were in trainer "
                f"{numbers[-1] + 1}.\n"
                f"Create one Trainer per program if the job has spares; several calls of fit() are possible."
            )
        )
    progress = [rank_state.progress for rank_state in rank_states]
    newest = max((numbers for numbers in progress if numbers is not None), default=None)
    return NewestState(rank_states, progress.index(newest))


def send(newest: NewestState, collect: Callable[[], Any], load: Callable[[Any], None], device: torch.device) -> None:
    """Send the newest state to the ranks that lack it (collective).

    The state of a rank is replaced after the new one has arrived completely. Tensors are sent one by one, so that a
    rank that has the state already allocates memory for one tensor only.

    Args:
        newest: The states of all ranks.
        collect: Returns the state of this rank; called on the source.
        load: Loads a state; called on the ranks that lack it.
        device: The device of this rank.
    """
    if not newest.ranks_without:
        return
    rank = dist.get_rank()
    packed, tensors = checkpoint.pack(collect()) if rank == newest.source else (b"", [])
    kinds = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    packed, kinds = collectives.broadcast_object((packed, kinds), src=newest.source)
    lacks = rank in newest.ranks_without
    received = []
    for number, (shape, dtype, kind) in enumerate(kinds):
        if rank == newest.source:
            tensor = tensors[number].contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device if kind == device.type else kind)
        dist.broadcast(tensor, newest.source)
        if lacks:
            received.append(tensor)
    parallel.complete_operations()
    if lacks:
        load(checkpoint.unpack(packed, received))
