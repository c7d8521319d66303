"""`torch.distributed.shrink_group` for groups over MPI: the ranks that call it continue without the excluded ones.

The default group continues as a new world. If ranks have failed, `recovery` forms it; otherwise the remaining ranks
create its communicator without the excluded ranks, whose processes take no part in this.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence

import torch.distributed as dist

from mpicomm import mpi, torch_internals
from mpicomm.backend import groups
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.errors import MpicommError
from mpicomm.job import mpi_job, recovery, session, session_setup
from mpicomm.job.session import Session
from mpicomm.recorder import flight_recorder, rank_text
from mpicomm.watchdog import agent, rank_failures
from mpicomm.watchdog.rank_failures import RankFailures

_EVIDENCE_SECONDS = 1.0  # for the failures of further ranks to become known, once that of one is


@functools.cache
def serve_torch() -> None:
    """Make `torch.distributed.shrink_group` call `shrink_group` for groups over MPI."""
    torch_internals.set_shrink_of(MPIProcessGroup, shrink_group)


def shrink_group(group: MPIProcessGroup, excluded: list[int], aborts: bool) -> dist.ProcessGroup:
    """Continue without some ranks of a group (collective over the others).

    Args:
        group: The group, which cannot be used any more.
        excluded: Ranks of the group, in ascending order; this rank is none of them.
        aborts: Whether operations that have not completed are aborted, if MPI can do that: an Open MPI with ULFM.

    Returns:
        The new group; the new default group if `group` was the default one.

    Raises:
        MpicommError: If messages are in flight that are not to be aborted, or the default group was not created by
            `bootstrap`.
        ValueError: If fewer than `min_ranks` ranks would remain, or ranks have failed, but not all excluded ones.
        RankFailedError: If a rank has failed, and the group is not the default group.
    """
    aborts = aborts and mpi.tolerates_failures()
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
        watch.break_group(group.group_name, cause, flight_recorder.OTHER_GROUP)  # for the excluded ranks
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
        MpicommError: If there is none, or the world has spares.
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
    if (failures := last.failures) is not None and failures.wait_until_known():
        _recover(last, failures, excluded)
        return
    least, left = last.request.min_ranks, last.world.size - len(excluded)
    if left < least:
        raise ValueError(
            f"shrink_group: {left} ranks would remain, fewer than min_ranks={least} of bootstrap().\n"
            f"Exclude fewer ranks, or pass a smaller min_ranks to bootstrap()."
        )
    try:
        with recovery.time_limit(last, "shrink_group()"):
            _continue_without(last, excluded, aborts=aborts)
    except Exception as error:
        if failures is None or rank_failures.error_after(error) is None:
            raise
        _recover(last, failures, excluded)


def _recover(last: Session, failures: RankFailures, excluded: list[int]) -> None:
    """Continue without the failed ranks, which must contain the excluded ones."""
    mpi.poll(lambda: set(excluded) <= set(failures.ranks), _EVIDENCE_SECONDS)
    if alive := sorted(set(excluded) - set(failures.ranks)):
        raise ValueError(
            f"shrink_group: after the failure of {rank_text.name_ranks(failures.ranks)}, only failed ranks can be "
            f"excluded, but {rank_text.name_ranks(alive)} has not failed.\n"
            f"Exclude {failures.ranks} first, on all other ranks."
        )
    recovery.recover_from(last)


def _continue_without(last: Session, excluded: list[int], *, aborts: bool) -> None:
    """Form the next world without ranks that have not failed."""
    # 1. the communicator of the remaining ranks, which all of them must call for
    if not aborts:
        _finish([group for group in torch_internals.all_groups() if isinstance(group, MPIProcessGroup)])
    remaining = [rank for rank in range(last.world.size) if rank not in excluded]
    comm = groups.remaining_comm(remaining, last.request.operation_timeout.total_seconds())
    # 2. the end of the last world
    cause = f"its world has ended, since shrink_group() has excluded {rank_text.name_ranks(excluded)}"
    groups.end_all(_error_of(excluded), cause, revokes=aborts)
    last.close(recovers=True)
    if last.watch is not None:
        last.watch.continue_without(excluded)
    last.stop_watching()
    mpi.forget_revoked()
    # 3. the next world
    job = mpi_job.rejoin(mpi.tracked(comm), comm.size, last.request, last.settings, last.job)
    opened = session_setup.create(last.request, last.launch, last.settings, job, last.shutdown, last)
    session_setup.open_session(opened)
    session.set_current(opened)
