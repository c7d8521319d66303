"""The groups of this process: creation of their communicators, and functions over all groups."""

from __future__ import annotations

import contextlib
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpicomm import mpi
from mpicomm.backend.execution import backward_errors
from mpicomm.backend.execution.executor import Executor
from mpicomm.backend.gpu.probe import choose_transport
from mpicomm.backend.gpu.transport import DIRECT
from mpicomm.errors import MpicommError
from mpicomm.recorder import flight_recorder, rank_text
from mpicomm.settings import Settings
from mpicomm.watchdog import rank_failures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_SMALLEST_TAG_UB = 32767  # the largest tag that every MPI allows: MPI-4.1, section 9.1.2

_executors: weakref.WeakSet[Executor] = weakref.WeakSet()  # created and read on the main thread


def make_for_torch(options: Any, *, takes_gpu_tensors: bool) -> Executor:
    """Create the executor of a group that torch creates (collective over its ranks).

    Args:
        options: torch's description of the group.
        takes_gpu_tensors: Whether MPI also handles GPU tensors.

    Raises:
        MpicommError: If the arguments `rank` and `world_size` of `init_process_group` contradict MPI.
    """
    backward_errors.watch_backward()
    name, seconds = options.group_id, options.timeout.total_seconds()
    if ranks := list(options.global_ranks_in_group):
        return make(name, ranks, seconds, takes_gpu_tensors=takes_gpu_tensors)
    world = mpi.job_comm(all_ranks_call=True, takes_gpu_tensors=takes_gpu_tensors)
    rank, size = options.group_rank, options.group_size
    if (rank, size) not in ((world.rank, world.size), (-1, -1)):
        raise MpicommError(
            f"torch.distributed received rank {rank} of {size}, but the MPI rank is {world.rank} of {world.size}.\n"
            f"Call mpicomm.bootstrap(), which sets rank and world_size."
        )
    record = flight_recorder.Group(name, range(world.size), seconds, is_world=True)
    return _make(record, world.Dup, takes_gpu_tensors)


def make(name: str, ranks: Sequence[int], seconds: float, *, takes_gpu_tensors: bool) -> Executor:
    """Create the executor of a group of some ranks (collective over these ranks only).

    Args:
        name: The name of the group in torch.
        ranks: The members' ranks in the job, in the order of the group.
        seconds: The timeout of an operation.
        takes_gpu_tensors: Whether MPI also handles GPU tensors.
    """
    record = flight_recorder.Group(name, ranks, seconds, is_world=False)
    return _make(record, lambda: _make_comm(name, ranks), takes_gpu_tensors)


def _make(record: flight_recorder.Group, make_comm: Callable[[], Intracomm], takes_gpu_tensors: bool) -> Executor:
    settings = Settings.from_environ(os.environ)  # not those of a session: groups exist without bootstrap()
    with _recorded(record, "new_group"):
        comm = mpi.tracked(make_comm())
        transport = choose_transport(comm, settings) if takes_gpu_tensors else DIRECT
    executor = Executor(comm, record, settings, transport)
    _executors.add(executor)
    return executor


@contextlib.contextmanager
def _recorded(record: flight_recorder.Group, operation: str) -> Iterator[None]:
    """Record the creation of a group as its operation 0, since a rank may never reach it."""
    flight_recorder.refuse_children()
    record.sequence = -1
    running = flight_recorder.note(record, operation, None, 0, None, is_message=False, is_running=True)
    try:
        yield
    except Exception as error:
        rank_failures.raise_if_failed(error)
        raise
    finally:
        running.finish()


def remaining_comm(ranks: Sequence[int], seconds: float, wait: Callable[[], None]) -> Intracomm:
    """Create the communicator of the ranks of the job that continue without the others (collective over these ranks).

    Args:
        ranks: These ranks.
        seconds: The timeout.
        wait: Waits for all of them.
    """
    name = f"shrink_group to {rank_text.name_ranks(ranks)}"
    with _recorded(flight_recorder.Group(name, ranks, seconds, is_world=False), "shrink_group"):
        wait()
        return _make_comm(name, ranks)


def _make_comm(name: str, ranks: Sequence[int]) -> Intracomm:
    world = mpi.job_comm()
    members = world.group.Incl(ranks)
    tag = zlib.crc32(name.encode()) % _SMALLEST_TAG_UB  # equal on all members, rarely that of another group
    try:
        return world.Create_group(members, tag=tag)
    finally:
        members.Free()


def drain() -> None:
    """Wait until all operations that this rank has queued, on any group, have run."""
    for executor in list(_executors):
        executor.drain()


def end_all(error: MpicommError, cause: str, *, revokes: bool) -> None:
    """End all groups without communication.

    Args:
        error: The error of operations that have not completed.
        cause: Why the groups cannot be used any more, for later calls.
        revokes: Whether calls in progress end, on all ranks.
    """
    flight_recorder.break_all(cause, flight_recorder.OTHER_GROUP)  # for calls in progress that this ends
    for executor in list(_executors):
        executor.end(error, revokes=revokes)
    flight_recorder.end_all(cause)


def is_stuck() -> bool:
    """Return whether an operation of a broken group of this rank is still not complete."""
    return any(executor.is_stuck() for executor in list(_executors))


def are_sending() -> bool:
    """Return whether messages that this rank sent are still in flight."""
    return any(executor.is_sending() for executor in list(_executors))


def advance() -> None:
    """Drive the progress of in-flight messages of all groups."""
    for executor in list(_executors):
        executor.advance()
