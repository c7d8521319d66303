"""`shutdown()` ends the job, explicitly or when the process exits."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback

from mpicomm import mpi, torch_internals
from mpicomm.backend import groups
from mpicomm.errors import RankFailedError
from mpicomm.job import recovery, session
from mpicomm.watchdog import error_output, exit_hooks, rank_failures
from mpicomm.watchdog.agent import Watchdog

_EXIT_POLL_SECONDS = 0.01  # between two polls of messages in flight, while other ranks still run


def shutdown() -> None:
    """Destroy the process groups, free the communicator and restore the environment (collective).

    Runs automatically at exit. MPI is finalised at exit, not here, so that `bootstrap` may be called again. While an
    exception is being handled, the call has no effect.
    """
    ending = session.current()
    if ending is None or not ending.is_open or ending.pid != os.getpid():
        return
    if isinstance(sys.exc_info()[1], Exception):
        return  # in a `finally`: the other ranks may be elsewhere; the exception ends the job, or this runs at exit
    # 1. wait for all ranks
    ending.is_open = False
    atexit.unregister(shutdown_at_exit)
    if ending.watch is not None and not ending.job.is_spare:
        try:
            _leave(ending.watch)
        except RankFailedError:
            recovery.leave_without_failed(ending)
    # 2. release torch's and MPI's resources
    ending.close()
    torch_internals.let_gloo_finish()
    rank_failures.wait_for_aborts()
    if mpi.is_usable() and not mpi.is_abandoned():
        for comm in ending.communicators:
            mpi.free(comm)
    # 3. stop the watchdog
    ending.stop_watching()
    exit_hooks.disarm()
    # The store stays open until the process exits or calls bootstrap again: other ranks may still use it.


def _leave(watch: Watchdog) -> None:
    """Wait until every rank is ready to exit, so that no rank waits for one that has exited (collective)."""
    groups.drain()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # if MPI cannot be finalized, a launcher may end this rank as soon as another exits
    watch.leave(exit_hooks.exit_status(), is_stuck=groups.is_stuck(), sends=groups.are_sending())
    if watch.wait_for_all_to_leave(groups.advance, _EXIT_POLL_SECONDS):
        mpi.abandon()
    watch.take_down()


def shutdown_at_exit() -> None:
    """Call `shutdown` when the process exits, and print its error, which does not change the exit status."""
    try:
        shutdown()
    except Exception:  # noqa: BLE001  an error of any kind is printed
        ended = session.current()
        assert ended is not None
        rank = session.describe_rank(ended.world)
        error_output.print_stderr(f"[mpicomm] {rank}: shutdown() failed at exit\n{traceback.format_exc()}")
