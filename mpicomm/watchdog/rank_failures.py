"""The failed ranks of a world that can be recovered, and the error that operations raise because of them.

The watchdog records failures as soon as a connection is lost; an operation whose MPI call fails records those that MPI
knows. Recording one breaks all groups, revokes their communicators, and aborts those of vendors' libraries, so that
blocked calls return on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from mpicomm import mpi
from mpicomm.errors import RankFailedError
from mpicomm.recorder import flight_recorder, rank_text

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

T = TypeVar("T")
_EVIDENCE_SECONDS = 1.0  # after an error of MPI, for the watchdog or MPI to report a failure
_NAME_SECONDS = 10.0  # after another rank has revoked the communicator, for them to report which rank has failed
_UNKNOWN = "its process ended without reporting an error (killed or crashed)"


class RankFailures:
    """The failed ranks of one world, as this rank knows them."""

    def __init__(self, comm: Intracomm | None, hosts: Sequence[str], size: int) -> None:
        """Start without failures.

        Args:
            comm: The communicator of all processes: the ranks of the world, then the spares.
            hosts: The host of every rank, spares last.
            size: The number of ranks of the world.
        """
        self._comm = comm
        self._size = size
        self._hosts = hosts[:size]
        self._lock = threading.Lock()
        self._reasons: dict[int, str] = {}
        self.has_any = threading.Event()
        """Whether a rank has failed."""

        self.is_aborting = False
        """Whether the job is being aborted: the ranks that the abort ends first must not be recovered from."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that are known to have failed."""
        return sorted(self._reasons)

    def record(self, reasons: Mapping[int, str]) -> None:
        """Record why ranks have failed; may be called on any thread. The first reason of a rank is kept.

        A spare that is lost leaves the world complete.
        """
        mpi.record_lost_processes()
        in_world = {rank: reason for rank, reason in reasons.items() if rank < self._size}
        if not in_world:
            return
        with self._lock:
            self._reasons = {**in_world, **self._reasons}
        self.has_any.set()  # first: operations that the next lines interrupt must raise RankFailedError
        flight_recorder.break_all(self.describe(self.ranks))
        mpi.revoke_all()
        _abort_groups()

    def describe(self, ranks: Sequence[int]) -> str:
        """Return which ranks have failed, and why."""
        if not ranks:
            return "a rank failed"
        reasons = dict.fromkeys(self._reasons.get(rank, _UNKNOWN) for rank in ranks)
        return f"{rank_text.full_name(ranks, self._hosts)} failed: {'; '.join(reasons)}"

    def wait_until_known(self) -> bool:
        """Wait until it is known which rank has failed; return whether one has.

        On a busy machine, or while the watchdogs start, this rank may know only that another one has revoked the
        communicator.
        """
        if mpi.poll(self._is_known, _EVIDENCE_SECONDS):
            return True
        if self._comm is None or not self._comm.Is_revoked():
            return False
        mpi.poll(self._is_known, _NAME_SECONDS)
        return True

    def _is_known(self) -> bool:
        if not self.has_any.is_set() and self._comm is not None and (failed := mpi.failed_ranks(self._comm)):
            self.record(dict.fromkeys(failed, _UNKNOWN))
        return self.has_any.is_set()

    def error(self) -> RankFailedError:
        """Return the error of operations."""
        ranks = self.ranks
        return RankFailedError(
            f"{self.describe(ranks)}.\n"
            f"Call mpicomm.recover() on the remaining ranks to continue without {'it' if len(ranks) < 2 else 'them'}.",
            ranks,
            [self._hosts[rank] for rank in ranks],
            "; ".join(dict.fromkeys(self._reasons[rank] for rank in ranks)),
        )


_current: RankFailures | None = None


def current() -> RankFailures | None:
    """Return the failures of the current world; None if a failure aborts the job, or the job is being aborted."""
    return None if _current is None or _current.is_aborting else _current


def known() -> RankFailures | None:
    """Return the failures of the current world if a rank has failed, and the job is not being aborted; else None."""
    failures = current()
    return failures if failures is not None and failures.has_any.is_set() else None


def set_current(failures: RankFailures | None) -> None:
    """Set the failures of the current world; None if a failure aborts the job."""
    global _current  # noqa: PLW0603  a process is in one job at a time
    _current = failures


def error_after(error: Exception) -> RankFailedError | None:
    """Return the error to raise in place of one of an operation, if a rank has failed; else None."""
    if (failures := current()) is None or isinstance(error, RankFailedError):
        return None
    # Other errors may be those of the program; NCCL's are of type DistBackendError.
    may_be_failure = isinstance(error, (mpi.api().Exception, ProcessLookupError, dist.DistError))
    has_failed = failures.wait_until_known() if may_be_failure else failures.has_any.is_set()
    return failures.error() if has_failed else None


def raise_if_failed(error: Exception | None) -> None:
    """Raise RankFailedError if a rank has failed.

    Args:
        error: The error of the code that has just run, or None.

    Raises:
        RankFailedError: If a rank has failed.
    """
    failed: RankFailedError | None = None
    if error is not None:
        failed = error_after(error)
    elif failures := known():
        failed = failures.error()
    if failed is not None:
        raise failed from error


# -- groups of vendors' libraries -----------------------------------------------------------------------------------


_ABORT_SECONDS = 2.0  # at the exit, for aborts in progress
_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_aborts: list[threading.Thread] = []
_changing = threading.Lock()


def call(function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Call a function of a vendor's library.

    Raises:
        RankFailedError: In place of an error of the function, if a rank has failed.
    """
    try:
        return function(*args, **keywords)
    except Exception as error:
        raise_if_failed(error)
        raise


def abort_on_failure(group: dist.ProcessGroup) -> None:
    """Abort a group of a vendor's library as soon as a rank has failed.

    Otherwise its operations wait on the device for that rank, and so do the threads that wait for the device, which no
    other call interrupts.
    """
    with _changing:
        _groups.add(group)
    if known():
        _abort_groups()


def keep_on_failure(group: dist.ProcessGroup) -> None:
    """Do not abort a group when a rank fails: it has ended."""
    with _changing:
        _groups.discard(group)


def wait_for_aborts() -> None:
    """Wait for aborts in progress, for a limited time: a thread that needs Python while it ends aborts the process."""
    deadline = time.monotonic() + _ABORT_SECONDS
    for thread in _aborts:
        thread.join(max(0.0, deadline - time.monotonic()))


def _abort_groups() -> None:
    """Abort all groups, each on a thread: an abort can take long, and can need those of other groups."""
    with _changing:
        groups = list(_groups)
        _groups.clear()
        threads = [threading.Thread(target=_abort, args=(each,), name="mpicomm-abort", daemon=True) for each in groups]
        _aborts[:] = [*filter(threading.Thread.is_alive, _aborts), *threads]
        for thread in threads:
            thread.start()


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # recover() aborts it again, and then raises the error
        group.abort()
