"""`recover()` continues the job without failed ranks: it ends their world and forms one of the other processes."""

from __future__ import annotations

import importlib
import os
import time
from typing import TYPE_CHECKING

from mpicomm import mpi, session
from mpicomm.errors import MpicommError, RankFailedError
from mpicomm.session import Session, World
from mpicomm.startup import mpi_job, survivors
from mpicomm.startup.survivors import NextWorld
from mpicomm.watchdog import exit_hooks, rank_failures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_SPARE_SECONDS = 0.2  # between two checks of a spare whether all ranks have exited
_ABORT_SECONDS = 10.0  # for MPI_Abort on another rank to end this process
_ATTEMPTS = 2  # to form a world of the same processes


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
    last = session.current()
    if last is None or not last.is_open or last.failures is None:
        raise MpicommError(
            'recover: the job was not started with on_failure="recover".\n'
            'Call mpicomm.bootstrap(on_failure="recover"), and start the job with mpicomm run --fault-tolerant.'
        )
    if rank_failures.current() is None:
        time.sleep(_ABORT_SECONDS)
        raise MpicommError("recover: the job is being aborted.\nCheck the output of the other ranks for the cause.")
    if not last.failures.find():
        raise MpicommError(
            "recover: no rank has failed.\nCall recover() only after an operation has raised RankFailedError."
        )
    return recover_from(last).world


def recover_from(last: Session) -> Session:
    """End the last world, and form the next one of the processes that are left (collective over these)."""
    start = time.monotonic()
    mpi.record_lost_processes()
    mpi.revoke_all()
    session.end_world(last)
    with session.time_limit(last, "recover()"):
        following, found = _form_next_world(last)
    session.set_current(following)
    if following.request.abort_on_error:
        session.arm_abort(following.world.rank, following.world.size, following.job.base)
    if found.comm.rank == 0:
        number, seconds = following.world.recoveries, time.monotonic() - start
        exit_hooks.print_stderr(
            f"[mpicomm] {_describe(last, found)}; continuing with {following.world.size} ranks after {seconds:.2f} s "
            f"(recovery {number})\n"
        )
    return following


def _form_next_world(last: Session) -> tuple[Session, NextWorld]:
    """Form the next world of the processes that are left (collective over these)."""
    assert last.job.base is not None
    comm, place = last.job.base, last.place
    size, attempts, error = 0, 0, None
    while True:
        # 1. find the processes that are left; until then, the watchdog of the last world reports ranks that hang
        comm, found = survivors.regroup(comm, place)
        session.stop_watching(last)
        mpi.forget_revoked()
        comm, place = found.comm, found.place
        if not found.size:
            raise SystemExit(0)  # of a spare: all ranks have finished
        _check_enough(last, found)
        attempts = attempts + 1 if comm.size == size else 1  # no process has failed in the last attempt, or one has
        if attempts > _ATTEMPTS:
            raise MpicommError(
                f"recover: the new world cannot be formed: {_cause(comm, error)}\n"
                f"Correct the cause, and start the job again."
            ) from error
        # 2. form the next world
        following, size, error = None, comm.size, None
        try:
            job = mpi_job.rejoin(
                comm, found.size, last.request, last.settings.interface, last.world.backend, last.world.device
            )
            following = session.create(last.request, last.launch, last.settings, job, last)
            session.open_session(following)
        except Exception as caught:  # noqa: BLE001  if another process has failed, the next attempt is without it
            error = caught
            mpi.revoke_all()
            comm.Revoke()  # other processes may wait for this one
        # 3. all processes agree that they have formed it
        if survivors.agree(comm, error is None):
            assert following is not None
            return following, found
        mpi.revoke_all()
        if following is not None:
            session.end_world(following)
            session.stop_watching(following)


def _cause(comm: Intracomm, error: Exception | None) -> str:
    """Return why the last attempt has failed: the first error that is not the consequence of another one (collective).

    Args:
        error: The error of this process.
    """
    is_consequence = error is None or isinstance(error, (RankFailedError, mpi.api().Exception))
    texts: list[str | None] = comm.allgather(None if is_consequence else str(error) or type(error).__name__)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), f"{error}.")


def _check_enough(last: Session, found: NextWorld) -> None:
    """Abort the job if fewer ranks are left than the program needs."""
    least = last.request.min_ranks
    if found.size >= least:
        return
    if found.comm.rank == 0:
        exit_hooks.print_stderr(
            f"[mpicomm] {_describe(last, found)}; {found.size} ranks are left, fewer than min_ranks={least}; "
            f"aborting the job\n"
        )
        session.abort(1, found.comm)
    time.sleep(_ABORT_SECONDS)
    os._exit(1)


def _describe(last: Session, found: NextWorld) -> str:
    """Return which ranks have failed, and why."""
    assert last.failures is not None
    return last.failures.describe(found.failed)


def wait_as_spare() -> None:
    """Wait until this process takes the place of a failed rank; end the process if all ranks have exited."""
    importlib.import_module("torch._dynamo")  # which creating an optimizer imports, in half a second
    while (mine := session.current()) is not None and mine.job.is_spare:
        assert mine.failures is not None
        while not mine.failures.has_any.wait(_SPARE_SECONDS):
            if mine.watch is None or mine.watch.has_seen_all_exit():
                raise SystemExit(0)
        recover_from(mine)
