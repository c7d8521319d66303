"""torch's monitored barrier, in which rank 0 lists the missing ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicomm.arguments import Deadline
from mpicomm.backend.transfer import mpi_calls
from mpicomm.missing_ranks import ReportingBarrier

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class MonitoredBarrier:
    """The monitored barriers of one group; the group stays usable after a failure."""

    def __init__(self, comm: Intracomm) -> None:
        self._rank = comm.rank
        self._barrier = ReportingBarrier(comm, mpi_calls.tag_of_barrier())

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
