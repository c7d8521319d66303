"""`torch.distributed.shrink_group` for groups over MPI: the ranks that call it continue without the excluded ones.

The default group continues as a new world. If ranks have failed, `recovery` forms it; otherwise the remaining ranks
create its communicator without the excluded ranks, whose processes take no part in this.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from mpicomm import mpi, torch_internals
from mpicomm.backend import groups
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.errors import MpicommError, RankFailedError
from mpicomm.job import mpi_job, recovery, session, session_setup
from mpicomm.job.session import Session
from mpicomm.recorder import flight_recorder, rank_text
from mpicomm.watchdog import agent, rank_failures
from mpicomm.watchdog.rank_failures import RankFailures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_EVIDENCE_SECONDS = 1.0  # for the failures of further ranks to become known, once that of one is


@functools.cache
def serve_torch() -> None:
    """Make `torch.distributed.shrink_group` call `shrink_group` for groups over MPI."""
    torch_internals.set_shrink_of(MPIProcessGroup, shrink_group)


def shrink_group(group: MPIProcessGroup, excluded: list[int], aborts: bool) -> dist.ProcessGroup:
    """Continue without some ranks of a group (collective over the others).

    Args:
        group: The group, which cannot be used any more.
        excluded: Ranks of the group, in ascending order, without this rank.
        aborts: Whether operations that have not completed are aborted, if MPI can do that: an Open MPI with ULFM.

    Returns:
        The new group; the new default group if `group` was the default one.

    Raises:
        MpicommError: If the group cannot be used any more, messages are in flight that are not to be aborted, or the
            default group was not created by `bootstrap`.
        ValueError: If fewer than `min_ranks` ranks would remain, or ranks have failed, but not all excluded ones.
        RankFailedError: If a rank has failed, and the group is not the default group; if another rank fails meanwhile.
    """
    aborts = aborts and mpi.tolerates_failures()
    if rank_failures.known() is None:
        group.check_open()
    if group is dist.group.WORLD:
        _shrink_world(_session(), excluded, aborts=aborts)
        return dist.group.WORLD
    if failures := rank_failures.known():
        raise failures.error()
    if not aborts:
        _finish([group])
    return _shrink_part(group, excluded, aborts=aborts)


def _finish(members: Sequence[MPIProcessGroup]) -> None:
    """Wait for the operations of groups.

    Raises:
        MpicommError: If messages are in flight.
    """
    for group in members:
        if not group.finish():
            either = ", or pass SHRINK_ABORT" if mpi.tolerates_failures() else ""
            raise MpicommError(
                f"shrink_group: messages of group {group.group_name} are in flight.\n"
                f"Call wait() on the works of isend and irecv first{either}."
            )


def _error_of(excluded: Sequence[int]) -> MpicommError:
    return MpicommError(
        f"the operation has not completed: shrink_group() has ended its group, to continue without "
        f"{rank_text.name_ranks(excluded)}.\nCall the operation again on the new group."
    )


# -- a group that is not the default group -----------------------------------------------------------------------------


def _shrink_part(group: MPIProcessGroup, excluded: list[int], *, aborts: bool) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    remaining = [rank for index, rank in enumerate(ranks) if index not in excluded]
    outside = [ranks[index] for index in excluded]
    name = f"{group.group_name}:shrunk:{'-'.join(map(str, outside))}"
    shrunk = torch_internals.make_group(remaining, name, datetime.timedelta(seconds=group.timeout_seconds))
    cause = f"ranks have continued without {rank_text.name_ranks(outside)} (shrink_group)"
    if (watch := agent.current()) is not None and dist.get_rank(shrunk) == 0:
        # For the excluded ranks, which may still complete operations that the others have completed.
        watch.break_group(group.group_name, cause, flight_recorder.OTHER_GROUP, agent.EXCLUDED_SECONDS)
    if aborts:
        group.abort()
    else:
        group.end(_error_of(outside))
    dist.destroy_process_group(group)
    return shrunk


# -- the world ---------------------------------------------------------------------------------------------------------


def _session() -> Session:
    """Return the session of the default group.

    Raises:
        MpicommError: If it has no session, or the world has spares.
    """
    current = session.current()
    if current is None or not current.is_open or current.job.process_comm is None:
        raise MpicommError(
            "shrink_group: the default group was not created by mpicomm.bootstrap().\n"
            "Call mpicomm.bootstrap() in place of init_process_group()."
        )
    if current.job.process_comm.size > current.job.plan.size:
        raise MpicommError(
            "shrink_group: the default group has spares, which take the places of failed ranks.\n"
            "Call mpicomm.recover() after a failure."
        )
    return current


def _shrink_world(last: Session, excluded: list[int], *, aborts: bool) -> None:
    """Form the next world without the excluded ranks (collective over the others)."""
    start, failures = time.monotonic(), last.failures
    # 1. after a failure, continue without the failed ranks
    if failures is not None and failures.has_any.is_set():
        _check_failed(failures, excluded)
        recovery.recover_from(last)
        return
    # 2. create the communicator of the remaining ranks
    least, left = last.request.min_ranks, last.world.size - len(excluded)
    if left < least:
        raise ValueError(
            f"shrink_group: {left} ranks would remain, fewer than min_ranks={least} of bootstrap().\n"
            f"Exclude fewer ranks, or pass a smaller min_ranks to bootstrap()."
        )
    if not aborts:
        _finish([group for group in torch_internals.all_groups() if isinstance(group, MPIProcessGroup)])
    try:
        comm = _remaining_comm(last, excluded, aborts=aborts)
    except RankFailedError:
        if failures is None or not set(excluded) <= set(failures.ranks):
            raise
        recovery.recover_from(last)
        return
    # 3. end the last world, and form the next one
    cause = f"its world has ended, since shrink_group() has excluded {rank_text.name_ranks(excluded)}"
    groups.end_all(_error_of(excluded), cause, revokes=aborts)
    last.close(recovers=True)
    with recovery.time_limit(last, "shrink_group()"):
        if failures is not None:
            mpi.record_lost_processes()  # a process that has been excluded may end at any time
            recovery.form_next(last, comm, frozenset(excluded), start)
        else:
            _form_next(last, comm)


def _check_failed(failures: RankFailures, excluded: list[int]) -> None:
    """Check that all excluded ranks have failed.

    Raises:
        ValueError: If one has not.
    """
    mpi.poll(lambda: set(excluded) <= set(failures.ranks), _EVIDENCE_SECONDS)
    if alive := sorted(set(excluded) - set(failures.ranks)):
        raise ValueError(
            f"shrink_group: after the failure of {rank_text.name_ranks(failures.ranks)}, only failed ranks can be "
            f"excluded, but {rank_text.name_ranks(alive)} {'has' if len(alive) == 1 else 'have'} not failed.\n"
            f"Exclude {failures.ranks} first, on all other ranks."
        )


def _remaining_comm(last: Session, excluded: list[int], *, aborts: bool) -> Intracomm:
    """Create the communicator of the remaining ranks (collective over these).

    Raises:
        RankFailedError: If a rank has failed before all of them have called.
    """

    def wait() -> None:
        if last.watch is not None:
            last.watch.continue_without(excluded, aborts=aborts)

    remaining = [rank for rank in range(last.world.size) if rank not in excluded]
    return groups.remaining_comm(remaining, last.request.operation_timeout.total_seconds(), wait)


def _form_next(last: Session, comm: Intracomm) -> None:
    """Form the next world of the processes of a communicator, with an MPI that ends the job if one of them fails."""
    last.stop_watching()
    mpi.forget_revoked()
    job = mpi_job.rejoin(comm, comm.size, last.request, last.settings, last.job)
    opened = session_setup.create(last.request, last.launch, last.settings, job, last.shutdown, last)
    session_setup.open_session(opened)
    session.set_current(opened)
