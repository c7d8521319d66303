"""torch's monitored barrier: each rank reports to rank 0 by a message, and rank 0 lists the missing ranks."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from mpicomm import mpi
from mpicomm.arguments import Deadline
from mpicomm.backend import mpi_calls

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request


class MonitoredBarrier:
    """The monitored barriers of one group; the group stays usable after a failure."""

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm
        self._number = 0  # of the barrier: a late message of one barrier must not count for the next
        self._late: list[tuple[Request, array[int]]] = []  # pending sends, possibly never received, and their buffers

    def wait(self, seconds: float, *, names_all: bool) -> None:
        """Wait for every rank (collective).

        Args:
            seconds: The timeout.
            names_all: Rank 0 waits for all ranks and lists all missing ranks, not only the first.

        Raises:
            RuntimeError: On rank 0, if a rank has not arrived within `seconds`; on the other ranks, if rank 0 has not
                released them. Type and wording are torch's, since programs match on them.
        """
        self._number += 1
        if self._comm.rank == 0:
            self._collect(seconds, names_all=names_all)
        else:
            self._report(seconds)

    def _collect(self, seconds: float, *, names_all: bool) -> None:
        if seconds <= 0:
            raise RuntimeError("Rank 0 timed out in monitoredBarrier: its timeout is 0 s.\nPass a positive timeout.")
        deadline = Deadline(seconds)
        missing: list[int] = []
        for rank in range(1, self._comm.size):
            if not self._has_reported(rank, deadline):
                missing.append(rank)
                if not names_all:
                    break
        if missing:
            ranks = ", ".join(map(str, missing))
            raise RuntimeError(
                f"{'Ranks' if names_all else 'Rank'} {ranks} failed to pass monitoredBarrier in {seconds:g} s.\n"
                f"Check that every rank calls monitored_barrier, or increase the timeout."
            )
        for rank in range(1, self._comm.size):
            self._announce(rank)

    def _report(self, seconds: float) -> None:
        self._announce(0)
        if not self._has_reported(0, Deadline(seconds)):
            raise RuntimeError(
                f"Rank {self._comm.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: timed out after {seconds:g} s.\nSee the error of rank 0 for the missing ranks."
            )

    def _announce(self, rank: int) -> None:
        number = array("q", [self._number])
        self._late = [(request, memory) for request, memory in self._late if not request.Test()]
        self._late.append((self._comm.Isend(number, rank, mpi_calls.tag_of_barrier()), number))

    def _has_reported(self, rank: int, deadline: Deadline) -> bool:
        """Return whether a rank reports before the deadline that it has reached this barrier; discard older reports."""
        number = array("q", [0])
        while number[0] < self._number:
            request = self._comm.Irecv(number, rank, mpi_calls.tag_of_barrier())
            if not mpi.poll(request.Test, deadline):
                request.Cancel()
                request.Wait()
                return False
        return True
