"""Continues the job after failures of ranks: ends their world, finds the processes that are left, forms the next one.

The communicator of all processes has the ranks of the world, then the spares. A spare takes the number of a failed
rank. If there are more failed ranks than spares, the remaining ranks keep their order, without gaps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from mpicomm import agreement, mpi
from mpicomm.backend import groups
from mpicomm.errors import MpicommError, RankFailedError
from mpicomm.job import mpi_job, session, session_setup
from mpicomm.job.session import Session, World
from mpicomm.watchdog import error_output, parent_link

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_SHORTEST_LIMIT = 10.0  # seconds; processes may notice a failure late on a busy machine
_SPARE_SECONDS = 0.2  # between two checks of a spare whether all ranks have exited
_ABORT_SECONDS = 10.0  # for MPI_Abort on another rank to end this process
_ATTEMPTS = 2  # to form a world of the same processes


@dataclasses.dataclass(frozen=True)
class Survivors:
    """The processes that are left of a world, before the next one is formed."""

    next_comm: Intracomm
    """All processes: the ranks of the next world in their order, then the spares; COMM_NULL on a finished rank."""

    size: int
    """The number of ranks of the next world."""

    failed: tuple[int, ...]
    """The ranks of the last world that have failed."""

    reports_end: bool
    """Whether this process reports the end of the world if no rank continues: the first of those that are left."""

    finished: frozenset[int]
    """The ranks that had reached the end of the program when another rank failed, and take no further part."""


def recover() -> World:
    """Continue without the failed ranks, after operations have raised RankFailedError (collective over the others).

    The remaining ranks form a new World: without gaps between the ranks, or with a spare in the place of each failed
    rank. It has a new store and a new default process group, and the environment variables describe it. All groups of
    the old world are unusable. A failure during the recovery starts it again. If fewer than `min_ranks` ranks are left,
    or if a rank that has not failed does not take part within the timeout of `bootstrap`, mpicomm aborts the job.

    Returns:
        The new World.

    Raises:
        MpicommError: If `bootstrap(on_failure="recover")` has not been called, no rank has failed, or the new world
            cannot be formed.
    """
    last_session = session.current()
    if last_session is None or not last_session.is_open or last_session.failures is None:
        raise MpicommError(
            'recover: the job was not started with on_failure="recover".\n'
            'Call mpicomm.bootstrap(on_failure="recover"), and start the job with mpicomm run --fault-tolerant.'
        )
    if last_session.failures.is_aborting:
        time.sleep(_ABORT_SECONDS)
        raise MpicommError("recover: the job is being aborted.\nCheck the output of the other ranks for the cause.")
    if not last_session.failures.wait_until_known():
        raise MpicommError(
            "recover: no rank has failed.\nCall recover() only after an operation has raised RankFailedError."
        )
    return recover_from(last_session).world


def recover_from(last_session: Session) -> Session:
    """End the last world, and form the next one of the processes that are left (collective over these)."""
    assert last_session.job.process_comm is not None
    start = time.monotonic()
    _end_world(last_session)
    with time_limit(last_session, "recover()"):
        return form_next(last_session, last_session.job.process_comm, frozenset(), start)


def form_next(last_session: Session, comm: Intracomm, finished: frozenset[int], start: float) -> Session:
    """Form the next world of the processes of a communicator that are left (collective over these).

    Args:
        last_session: The session of the last world, whose groups have ended.
        comm: The communicator of its processes, or of a part of them.
        finished: The ranks that are known to take no further part, but have not failed.
        start: The value of `time.monotonic()` at the start of the recovery.
    """
    request, settings = last_session.request, last_session.settings
    size, attempts, error = 0, 0, None
    while True:
        # 1. find the processes that are left; until then, the watchdog of the last world reports ranks that hang
        survivors = find_survivors(comm, last_session, finished)
        last_session.stop_watching()
        mpi.forget_revoked()
        comm, finished = survivors.next_comm, survivors.finished
        if not survivors.size:
            raise SystemExit(0)  # of a spare: all ranks have finished
        _check_enough(last_session, survivors)
        attempts = attempts + 1 if comm.size == size else 1  # no process has failed in the last attempt, or one has
        if attempts > _ATTEMPTS:
            raise MpicommError(
                f"recover: the new world cannot be formed: {_cause(comm, error)}\n"
                f"Correct the cause, and start the job again."
            ) from error
        # 2. form the next world
        next_session, size, error = None, comm.size, None
        try:
            job = mpi_job.rejoin(comm, survivors.size, request, settings, last_session.job)
            next_session = session_setup.create(
                request, last_session.launch, settings, job, last_session.shutdown, last_session
            )
            session_setup.open_session(next_session)
        except Exception as caught:  # noqa: BLE001  if another process has failed, the next attempt is without it
            error = caught
            mpi.revoke_all()
            comm.Revoke()  # other processes may wait for this one
        # 3. all processes agree that they have formed it
        if agreement.succeeded_on_all(comm, error is None) and next_session is not None:
            break
        if next_session is not None:
            _end_world(next_session)
            next_session.stop_watching()
    session.set_current(next_session)
    if comm.rank == 0 and survivors.failed:
        number, seconds = next_session.world.recoveries, time.monotonic() - start
        error_output.print_stderr(
            f"[mpicomm] {_describe(last_session, survivors)}; continuing with {next_session.world.size} ranks "
            f"after {seconds:.2f} s (recovery {number})\n"
        )
    return next_session


def leave_without_failed(last_session: Session) -> None:
    """End this rank's part in a world in which another rank has failed: it has finished, so it does not continue."""
    assert last_session.job.process_comm is not None
    _end_world(last_session)
    with time_limit(last_session, "shutdown()"):
        survivors = find_survivors(last_session.job.process_comm, last_session, frozenset(), is_finished=True)
    if survivors.reports_end and not survivors.size and last_session.settings.parent:
        # The last rank 0 may have failed. If other ranks continue, rank 0 of the next world reports their end.
        with contextlib.suppress(OSError, ValueError):
            parent_link.report_end(parent_link.Parent.parse(last_session.settings.parent), last_session.name)


def wait_as_spare() -> None:
    """Wait until this process takes the place of a failed rank; end the process if all ranks have exited."""
    importlib.import_module("torch._dynamo")  # which creating an optimizer imports, in half a second
    while (waiting := session.current()) is not None and waiting.job.is_spare:
        assert waiting.failures is not None
        while not waiting.failures.has_any.wait(_SPARE_SECONDS):
            if waiting.watch is None or waiting.watch.has_seen_all_exit():
                raise SystemExit(0)
        recover_from(waiting)


# -- the end of the last world -----------------------------------------------------------------------------------------


def _end_world(ended: Session) -> None:
    """Revoke all communicators of a world, and end its groups and variables without communication."""
    assert ended.failures is not None
    mpi.record_lost_processes()
    mpi.revoke_all()
    groups.end_all(ended.failures.error(), "its world has ended, since ranks have failed", revokes=True)
    ended.close(recovers=True)


@contextlib.contextmanager
def time_limit(last_session: Session, operation: str) -> Iterator[None]:
    """Abort the job at the timeout of operations: MPI waits without a limit for a process that does not respond.

    Args:
        operation: The function that the user has called.
    """
    seconds = max(last_session.request.operation_timeout.total_seconds(), _SHORTEST_LIMIT)

    def end() -> None:
        error_output.print_stderr(
            f"[mpicomm] {session.describe_rank(last_session.world)}: {operation} timed out after {seconds:g} s: "
            f"a rank that has not failed does not take part; aborting the job\n"
            f"Find the rank that is stopped or busy, or increase the timeout of bootstrap().\n"
        )
        session_setup.abort(1, last_session.job.process_comm)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# -- the processes that are left ---------------------------------------------------------------------------------------


def find_survivors(
    comm: Intracomm, last_session: Session, finished: frozenset[int], *, is_finished: bool = False
) -> Survivors:
    """Find the processes that are left, and order them for the next world (collective over these processes).

    A failure in the meantime starts it again. After one, Open MPI 5.0 may also report success of a collective operation
    whose result is incomplete, which then cannot be unpickled or used: any exception counts as a failure.

    Args:
        comm: The communicator of all processes of the last world; it is revoked.
        last_session: The session of this process in it.
        finished: The ranks that are known to have finished.
        is_finished: Whether this process has reached the end of the program: it only agrees on the failed ranks.

    Returns:
        The processes that are left, finished ranks too.
    """
    rank = None if last_session.job.is_spare else last_session.world.rank
    error: Exception | None = None
    while True:
        before = comm.size
        comm = cast("Intracomm", comm.Shrink())
        # Open MPI 5.0 crashes in Shrink() if another process, which has left it, revokes the new communicator.
        agreement.succeeded_on_all(comm, True)
        if comm.size == before and error is not None and not isinstance(error, mpi.api().Exception):
            raise error  # no process has failed: it is not the consequence of a failure
        survivors, error = None, None
        try:
            survivors = _order(comm, rank, last_session.job.plan.size, finished, is_finished=is_finished)
        except Exception as caught:  # noqa: BLE001  see above
            comm.Revoke()  # other processes may wait for this one
            error = caught
        if agreement.succeeded_on_all(comm, error is None) and survivors is not None:
            return survivors


def _order(comm: Intracomm, rank: int | None, size: int, finished: frozenset[int], *, is_finished: bool) -> Survivors:
    """Order the processes for the next world (collective).

    Args:
        comm: The communicator of the processes that are left.
        rank: The rank of this process in the last world; None on a spare.
        size: The number of ranks of the last world.
        finished: The ranks that are known to have finished.
        is_finished: Whether this process has finished.
    """
    # 1. the surviving, the finished and the failed ranks
    states: list[tuple[int | None, bool]] = comm.allgather((rank, is_finished))
    ranks = [rank for rank, _ in states if rank is not None]
    finished = finished | {rank for rank, has_finished in states if has_finished and rank is not None}
    failed = sorted(set(range(size)) - set(ranks) - finished)
    # 2. the next ranks of the processes that continue; if all ranks have finished, no spare replaces a failed one
    continuing = [rank for rank, has_finished in states if not has_finished]
    active = [rank for rank in continuing if rank is not None]
    vacant = failed if active else []
    next_size = len(active) + min(len(vacant), continuing.count(None))
    index = sum(1 for _, has_finished in states[: comm.rank] if not has_finished)  # of this process, if it continues
    next_comm = comm.Split(
        mpi.api().UNDEFINED if is_finished else 0, 0 if is_finished else next_ranks(continuing, vacant)[index]
    )
    return Survivors(cast("Intracomm", next_comm), next_size, tuple(failed), comm.rank == 0, finished)


def next_ranks(ranks: Sequence[int | None], failed: Sequence[int]) -> list[int]:
    """Return the next rank of every process: those of the next world from 0, then those of the remaining spares.

    Args:
        ranks: The last rank of every process; None for a spare.
        failed: The failed ranks.
    """
    vacant = iter(failed)
    highest = max([rank for rank in ranks if rank is not None] + list(failed), default=-1)
    keys = []  # the ranks of the last world; a spare has that of a failed rank, or one behind all ranks
    for index, rank in enumerate(ranks):
        key = next(vacant, None) if rank is None else rank
        keys.append(highest + 1 + index if key is None else key)
    next_rank_by_key = {key: next_rank for next_rank, key in enumerate(sorted(keys))}
    return [next_rank_by_key[key] for key in keys]


def _cause(comm: Intracomm, error: Exception | None) -> str:
    """Return why the last attempt has failed: the first error that is not the consequence of another one (collective).

    Args:
        error: The error of this process.
    """
    is_consequence = error is None or isinstance(error, (RankFailedError, mpi.api().Exception))
    texts: list[str | None] = comm.allgather(None if is_consequence else str(error) or type(error).__name__)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), f"{error}.")


def _check_enough(last_session: Session, survivors: Survivors) -> None:
    """Abort the job if fewer ranks are left than the program needs."""
    least = last_session.request.min_ranks
    if survivors.size >= least:
        return
    if survivors.next_comm.rank == 0:
        error_output.print_stderr(
            f"[mpicomm] {_describe(last_session, survivors)}; {survivors.size} ranks are left, "
            f"fewer than min_ranks={least}; aborting the job\n"
        )
        session_setup.abort(1, survivors.next_comm)
    time.sleep(_ABORT_SECONDS)
    os._exit(1)


def _describe(last_session: Session, survivors: Survivors) -> str:
    """Return which ranks have failed, and why."""
    assert last_session.failures is not None
    return last_session.failures.describe(survivors.failed)
