"""The groups of this process: how their communicators are made, and what concerns all of them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpicomm import mpi
from mpicomm.backend import gpu_transport, torch_internals
from mpicomm.backend.operations import Operations
from mpicomm.errors import MpicommError
from mpicomm.settings import Settings
from mpicomm.watchdog import flight_recorder

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_engines: weakref.WeakSet[Operations] = weakref.WeakSet()  # made and looked at on the main thread


def make_world(name: str, seconds: float, rank: int, size: int, *, takes_gpu_tensors: bool) -> Operations:
    """Make the operations of the group of all ranks (collective).

    Args:
        seconds: How long an operation may take.
        rank: What torch was told of this rank; -1 for nothing.
        size: What torch was told of the number of ranks; -1 for nothing.
        takes_gpu_tensors: Whether tensors on GPUs are for MPI too.

    Raises:
        MpicommError: If torch was told something else than MPI knows.
    """
    world = mpi.job_comm(by_all=True)
    if (rank, size) not in ((world.rank, world.size), (-1, -1)):
        raise MpicommError(
            f"torch.distributed was told rank {rank} of {size}, but MPI says {world.rank} of {world.size}.\n"
            f"Call mpicomm.bootstrap() and leave rank and world_size to it."
        )
    record = flight_recorder.Group(name, range(world.size), seconds, is_world=True)
    return _make(record, world.Dup, takes_gpu_tensors)


def make(name: str, ranks: Sequence[int], seconds: float, *, takes_gpu_tensors: bool) -> Operations:
    """Make the operations of a group of some ranks (collective over these alone).

    Args:
        ranks: The members' ranks in the job, in the order of the group.
        seconds: How long an operation may take.
        takes_gpu_tensors: Whether tensors on GPUs are for MPI too.
    """
    record = flight_recorder.Group(name, ranks, seconds, is_world=False)
    return _make(record, lambda: _make_comm(name, ranks), takes_gpu_tensors)


def _make(record: flight_recorder.Group, make_comm: Callable[[], Intracomm], takes_gpu_tensors: bool) -> Operations:
    flight_recorder.refuse_children()
    settings = Settings.from_environ(os.environ)
    record.sequence = -1  # a group's own making is its number 0: a rank may never come to that
    operation = flight_recorder.note(record, "new_group", None, 0, None, is_message=False, is_running=True, depth=3)
    try:
        comm = make_comm()
        transport = gpu_transport.choose(comm, settings) if takes_gpu_tensors else gpu_transport.NO_TRANSPORT
    finally:
        operation.finish()
    operations = Operations(comm, record, settings, transport)
    _engines.add(operations)
    return operations


def _make_comm(name: str, ranks: Sequence[int]) -> Intracomm:
    world = mpi.job_comm()
    members = world.group.Incl(ranks)
    try:
        return world.Create_group(members, tag=torch_internals.tag_of(name))
    finally:
        members.Free()


def drain() -> None:
    """Wait until what this rank has queued on any group has run."""
    for operations in list(_engines):
        operations.executor.drain()


def is_stuck() -> bool:
    """Tell whether an operation of this rank did not end in time, and may never."""
    return any(operations.executor.is_stuck() for operations in list(_engines))


def are_sending() -> bool:
    """Tell whether messages of this rank are on their way."""
    return any(operations.executor.is_sending() for operations in list(_engines))


def advance() -> None:
    """Let messages that are on their way make progress."""
    for operations in list(_engines):
        operations.executor.advance()
