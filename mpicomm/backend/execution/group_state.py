"""The state of a group on this rank: open, destroyed or broken; the errors that break it, and the checks of calls."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mpicomm import agreement, mpi
from mpicomm.arguments import Deadline
from mpicomm.backend.transfer import mpi_calls
from mpicomm.errors import MismatchError, MpicommError, raised_on_all_ranks
from mpicomm.missing_ranks import ReportingBarrier
from mpicomm.recorder import flight_recorder, rank_text
from mpicomm.recorder.flight_recorder import Operation
from mpicomm.watchdog import agent, rank_failures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

_LONGEST_PAUSE, _SHARE_OF_WAIT = 1e-3, 0.1  # between two checks of a barrier in slots: seconds, and of the wait so far
_CAUSE_SECONDS = 5.0  # for the watchdog to report why another rank has revoked the communicator of a group
_MONITORED_PAUSE = 1e-3  # seconds between two polls of a monitored barrier: the delay after the last rank has arrived


def check_unbroken(record: flight_recorder.Group) -> None:
    """Check that no error on this or another rank has made a group unusable.

    Raises:
        RankFailedError: If a rank has failed, and the job can be recovered.
        MpicommError: If another error has.
    """
    if not record.broken:
        return
    flight_recorder.refuse_children()
    message = f"group {record.name} cannot be used any more: {record.broken}."
    if record.remedy:
        raise MpicommError(f"{message}\n{record.remedy}")
    if failures := rank_failures.known():
        raise failures.error()
    raise MpicommError(f"{message}\nEnd the job.")


def check_revoked(error: BaseException, record: flight_recorder.Group) -> None:
    """Check that another rank has not aborted a group, which revokes its communicator.

    Args:
        error: The error of an operation.

    Raises:
        RankFailedError: If a rank has failed, and the job can be recovered.
        MpicommError: If another rank has aborted the group, perhaps before the watchdog reports it.
    """
    if mpi.is_revocation(error):
        mpi.poll(lambda: bool(record.broken), _CAUSE_SECONDS)
        record.broken = record.broken or "another rank has aborted it"
        check_unbroken(record)


class GroupState:
    """The state of one group."""

    def __init__(self, comm: Intracomm, record: flight_recorder.Group, *, raises_timeouts: bool) -> None:
        """Describe an open group.

        Args:
            raises_timeouts: Whether operations raise TimeoutError; otherwise the watchdog aborts the job.
        """
        self.record = record
        self.raises_timeouts = raises_timeouts
        self.is_open = True
        self._comm = comm
        self._outstanding: list[Request] = []  # barriers that timed out; MPI cannot cancel them
        self._barrier: tuple[Operation, Deadline] | None = None  # the last one that waited in slots

    def check_open(self) -> None:
        """Check that the group can be used.

        Raises:
            MpicommError: If it is broken or was destroyed.
        """
        check_unbroken(self.record)
        if not self.is_open:
            raise MpicommError(
                f"group {self.record.name} was destroyed.\nCreate a new one with torch.distributed.new_group()."
            )

    def break_by(self, cause: str) -> None:
        """Mark the group as unusable, and tell the watchdog, which tells the other ranks."""
        self.record.broken = self.record.broken or cause
        if (watch := agent.current()) is not None:
            watch.break_group(self.record.name, f"{cause} on rank {watch.rank_info.rank}")

    def fail(self, operation: Operation, error: BaseException) -> None:
        """Mark the group as unusable, unless all ranks raise this error: the ranks' next calls may not match.

        Args:
            error: The exception that ended the operation on this rank; a signal handler may raise any exception
                between two parts of an operation.

        Raises:
            RankFailedError: In place of the error, if it occurred because a rank has failed.
            MpicommError: In place of the error, if it occurred because another rank has aborted the group.
            RuntimeError: In place of the error, if MPI has received more data than this rank expects.
        """
        if isinstance(error, Exception):
            rank_failures.raise_if_failed(error)
        check_revoked(error, self.record)
        if getattr(error, "is_on_all_ranks", False):
            return
        kind = type(error).__name__
        how = f"failed: {str(error) or kind}" if isinstance(error, Exception) else f"was interrupted by {kind}"
        is_truncated = mpi.is_truncation(error)
        if is_truncated:
            how = "failed: another rank sent more data than this rank expects (MPI_ERR_TRUNCATE)"
        cause = f"{rank_text.describe_operation(operation.describe(0.0))} {how}"
        if not self.record.broken:
            self.break_by(cause)
        if is_truncated:
            overrun = ", and to keep Open MPI from writing beyond the ends of tensors" if mpi.overruns_buffers() else ""
            raise RuntimeError(
                f"{cause}: the ranks call with tensors of different sizes, or different operations.\n"
                f"Pass tensors of the same size on every rank; set MPICOMM_DEBUG=1 to see each rank's call{overrun}."
            ) from error

    def wait_for_all(self, operation: Operation, seconds: float) -> None:
        """Wait for every rank in a barrier that Python can interrupt (collective).

        Raises:
            TimeoutError: If a rank has not arrived after `seconds`; the message lists the missing ranks.
            MpicommError: If the group broke meanwhile, e.g. another rank timed out earlier.
        """
        limit, start = operation.limit, time.monotonic()
        if self.raises_timeouts:
            operation.exempt_from_watchdog()
        request = self._comm.Ibarrier()
        is_late = not mpi.poll(lambda: request.Test() or bool(self.record.broken), seconds)
        if is_late or self.record.broken:
            self._outstanding.append(request)
            self.check_open()
            raise self.time_out(operation, seconds)
        if self.raises_timeouts:  # the MPI call cannot be interrupted: from here the watchdog enforces the timeout
            operation.limit = limit
            operation.extend_deadline(time.monotonic() - start)

    def check_barrier(self, operation: Operation, seconds: float) -> None:
        """Check the timeout of a barrier in slots, which calls this again and again while ranks are late, and sleep.

        Raises:
            TimeoutError: If a rank has not arrived after the timeout; the message lists the missing ranks.
        """
        if self._barrier is None or self._barrier[0] is not operation:
            self._barrier = operation, Deadline(seconds)
        deadline = self._barrier[1]
        if deadline.count_down() < 0:
            raise self.time_out(operation, deadline.seconds)
        assert operation.start is not None
        time.sleep(min(_LONGEST_PAUSE, _SHARE_OF_WAIT * (time.monotonic() - operation.start)))

    def compare_calls(self, call: str, operation: Operation) -> None:
        """Compare this rank's call with the calls of the other ranks, as `MPICOMM_DEBUG=1` asks (collective).

        If all calls match, the ranks exchange only a digest: one all-reduce yields its minimum and maximum.

        Args:
            call: Readable text that must be equal on all ranks.

        Raises:
            MismatchError: On every rank if the calls differ; the message lists each call with its ranks.
        """
        signature = f"#{operation.sequence} {call}"
        digest = agreement.digest(signature.encode())
        if agreement.all_equal(agreement.minimum(self._comm, agreement.extremes(digest))):
            return
        calls = self._comm.allgather((signature, operation.where))
        ranks = agreement.ranks_by_value(calls, list(self.record.ranks))
        rows = [
            f"  {rank_text.name_ranks(members)}: {signature}, at {where}"
            for (signature, where), members in sorted(ranks.items(), key=lambda item: -len(item[1]))
        ]
        raise raised_on_all_ranks(
            MismatchError(
                "ranks call different collectives on one group, or one collective with different arguments:\n"
                + "\n".join(rows)
                + "\n#N counts the group's collectives.\nMake all ranks call the same operations in the same order."
            )
        )

    def time_out(self, operation: Operation, seconds: float) -> TimeoutError:
        """Return the error of a collective that timed out, and mark the group as unusable."""
        # 1. mark the group; the program receives the error and may continue, so the watchdog must not abort the job
        call = rank_text.describe_operation(operation.describe(0.0))
        self.record.broken = f"{call} timed out after {seconds:g} s"
        operation.exempt_from_watchdog()
        # 2. ask the watchdog for the missing ranks, and tell it that the group is broken
        watch = agent.current()
        missing, table = (
            watch.missing(operation) if watch is not None else ([], "At least one rank has not reached it.")
        )
        operation.pause()
        self.break_by(self.record.broken)
        # 3. compose the error
        if not missing:
            return TimeoutError(
                f"{self.record.broken}.\n{table}\nCheck the output of the other ranks, or increase the timeout."
            )
        # PyTorch's tests of timeouts search for " timeout ".
        return TimeoutError(
            f"{call} timed out after {seconds:g} s: {len(missing)} of {self._comm.size} ranks did not reach it: "
            f"{rank_text.name_ranks(missing)}.\n{table}\nThe group cannot be used any more.\n"
            f"Check that the missing ranks call it too, or increase the timeout of the operation."
        )

    def has_outstanding(self) -> bool:
        """Return whether barriers that timed out are pending; late ranks may have completed them meanwhile."""
        self._outstanding = [request for request in self._outstanding if _is_pending(request)]
        return bool(self._outstanding)


def _is_pending(request: Request) -> bool:
    """Return whether a request may still complete; it does not if its communicator has been revoked."""
    try:
        return not request.Test()
    except mpi.api().Exception:
        return False


class MonitoredBarrier:
    """torch's monitored barrier, in which rank 0 lists the missing ranks; the group stays usable after a failure."""

    def __init__(self, comm: Intracomm) -> None:
        self._rank = comm.rank
        self._barrier = ReportingBarrier(comm, mpi_calls.tag_of_barrier(), longest_pause=_MONITORED_PAUSE)

    def wait(self, seconds: float, *, names_all: bool) -> None:
        """Wait for every rank (collective).

        Args:
            seconds: The timeout.
            names_all: Rank 0 lists all missing ranks, not only the first.

        Raises:
            RuntimeError: On rank 0, if a rank has not arrived within `seconds`; on the other ranks, if rank 0 has not
                released them. Type and wording are torch's, since programs match on them.
        """
        self._barrier.begin()
        if self._rank:
            if self._barrier.receive_answer(Deadline(seconds)) is None:
                raise RuntimeError(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank 0: timed out after {seconds:g} s.\n"
                    f"See the error of rank 0 for the missing ranks."
                )
            return
        if seconds <= 0:
            raise RuntimeError("Rank 0 timed out in monitoredBarrier: its timeout is 0 s.\nPass a positive timeout.")
        if missing := self._barrier.missing(Deadline(seconds)):
            ranks = ", ".join(map(str, missing if names_all else missing[:1]))
            raise RuntimeError(
                f"{'Ranks' if names_all else 'Rank'} {ranks} failed to pass monitoredBarrier in {seconds:g} s.\n"
                f"Check that every rank calls monitored_barrier, or increase the timeout."
            )
        self._barrier.answer(0, [])
