"""The surviving ranks after failures: MPI agrees on them, and they compute their ranks in the next world.

The communicator has all processes of the job: the ranks of the world, then the spares. A spare takes the number of a
failed rank. If there are more failed ranks than spares, the remaining ranks keep their order, without gaps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from mpicomm import mpi

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in the last world."""

    rank: int | None
    """Its rank; None on a spare."""

    size: int
    """The number of ranks."""

    finished: frozenset[int] = frozenset()
    """The ranks that had reached the end of the program when another rank failed, and take no further part."""


@dataclasses.dataclass(frozen=True)
class NextWorld:
    """The processes of the next world, before it is formed."""

    comm: Intracomm
    """All processes: the ranks of the next world in their order, then the spares; COMM_NULL on a finished rank."""

    size: int
    """The number of ranks of the next world."""

    failed: tuple[int, ...]
    """The ranks of the last world that have failed."""

    place: Place
    """The place of this process in the last world."""


def regroup(comm: Intracomm, place: Place, *, is_finished: bool = False) -> tuple[Intracomm, NextWorld]:
    """Find the processes that are left, and order them for the next world (collective over these processes).

    A failure in the meantime starts it again. After one, Open MPI 5.0 may also report success of a collective operation
    whose result is incomplete, which then cannot be unpickled or used: any exception counts as a failure.

    Args:
        comm: The communicator of all processes of the last world; it is revoked.
        place: The place of this process in it.
        is_finished: Whether this process has reached the end of the program: it only agrees on the failed ranks.

    Returns:
        A communicator of all processes that are left, and the next world.
    """
    error: Exception | None = None
    while True:
        before = comm.size
        comm = cast("Intracomm", comm.Shrink())
        # Open MPI 5.0 crashes in Shrink() if another process, which has left it, revokes the new communicator.
        agree(comm, True)
        if comm.size == before and error is not None and not isinstance(error, mpi.api().Exception):
            raise error  # no process has failed: it is not the consequence of a failure
        found, error = None, None
        try:
            found = _next_world(comm, place, is_finished=is_finished)
        except Exception as caught:  # noqa: BLE001  see above
            comm.Revoke()  # other processes may wait for this one
            error = caught
        if agree(comm, error is None) and found is not None:
            return comm, found


def agree(comm: Intracomm, is_done: bool) -> bool:
    """Return whether a step is done on all processes, and none has failed (collective, also if `comm` is revoked)."""
    try:
        return bool(comm.Agree(is_done))
    except mpi.api().Exception:  # of all processes: one has failed
        return False


def _next_world(comm: Intracomm, place: Place, *, is_finished: bool) -> NextWorld:
    # 1. the surviving, the finished and the failed ranks
    of_all: list[tuple[int | None, bool]] = comm.allgather((place.rank, is_finished))
    ranks = [rank for rank, _ in of_all if rank is not None]
    finished = place.finished | {rank for rank, has_finished in of_all if has_finished and rank is not None}
    failed = sorted(set(range(place.size)) - set(ranks) - finished)
    # 2. the next ranks of the processes that continue; if all ranks have finished, no spare replaces a failed one
    going_on = [rank for rank, has_finished in of_all if not has_finished]
    active = [rank for rank in going_on if rank is not None]
    vacant = failed if active else []
    size = len(active) + min(len(vacant), going_on.count(None))
    numbers = assign(going_on, vacant)
    before = sum(1 for _, has_finished in of_all[: comm.rank] if not has_finished)
    ordered = comm.Split(mpi.api().UNDEFINED if is_finished else 0, 0 if is_finished else numbers[before])
    place = dataclasses.replace(place, finished=finished)
    return NextWorld(cast("Intracomm", ordered), size, tuple(failed), place)


def assign(ranks: Sequence[int | None], failed: Sequence[int]) -> list[int]:
    """Return the next rank of every process: those of the next world from 0, then those of the remaining spares.

    Args:
        ranks: The last rank of every process; None for a spare.
        failed: The failed ranks.
    """
    vacant = iter(failed)
    last = max([rank for rank in ranks if rank is not None] + list(failed), default=-1)
    numbers = []
    for index, rank in enumerate(ranks):
        number = next(vacant, None) if rank is None else rank
        numbers.append(last + 1 + index if number is None else number)  # behind all ranks, in their order
    order = {number: place for place, number in enumerate(sorted(numbers))}
    return [order[number] for number in numbers]
