"""torch's monitored barrier: rank 0 hears from each rank by a message of its own, and names those that did not come."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from mpicomm import mpi
from mpicomm.backend import mpi_calls
from mpicomm.durations import Deadline

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request


class MonitoredBarrier:
    """The monitored barriers of one group. The group stays usable when one fails."""

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm
        self._number = 0  # of this barrier: a rank that comes late to one must not pass for early at the next
        self._late: list[tuple[Request, array[int]]] = []  # sends that nobody may ever receive, and their memory

    def wait(self, seconds: float, *, names_all: bool) -> None:
        """Wait for every rank (collective).

        Args:
            names_all: Rank 0 waits for all, and names all that did not come, not only the first.

        Raises:
            RuntimeError: On rank 0, if a rank has not come within `seconds`; on the others, if rank 0 did not let them
                pass. As torch's own does, and in its words, which programs look for.
        """
        self._number += 1
        if self._comm.rank == 0:
            self._collect(seconds, names_all=names_all)
        else:
            self._report(seconds)

    def _collect(self, seconds: float, *, names_all: bool) -> None:
        if seconds <= 0:
            raise RuntimeError("Rank 0 timed out in monitoredBarrier: its timeout is 0 s.\nAllow more time.")
        deadline = Deadline(seconds)
        missing: list[int] = []
        for rank in range(1, self._comm.size):
            if not self._hears(rank, deadline):
                missing.append(rank)
                if not names_all:
                    break
        if missing:
            ranks = ", ".join(map(str, missing))
            raise RuntimeError(
                f"{'Ranks' if names_all else 'Rank'} {ranks} failed to pass monitoredBarrier in {seconds:g} s.\n"
                f"Look at what they do, or allow more time."
            )
        for rank in range(1, self._comm.size):
            self._say(rank)

    def _report(self, seconds: float) -> None:
        self._say(0)
        if not self._hears(0, Deadline(seconds)):
            raise RuntimeError(
                f"Rank {self._comm.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: no answer within {seconds:g} s.\nRank 0 knows which ranks did not come."
            )

    def _say(self, rank: int) -> None:
        number = array("q", [self._number])
        self._late = [(request, memory) for request, memory in self._late if not request.Test()]
        self._late.append((self._comm.Isend(number, rank, mpi_calls.tag_of_barrier()), number))

    def _hears(self, rank: int, deadline: Deadline) -> bool:
        """Return whether a rank reports before the deadline that it has reached this barrier."""
        number = array("q", [0])
        while number[0] < self._number:
            request = self._comm.Irecv(number, rank, mpi_calls.tag_of_barrier())
            if not mpi.poll(request.Test, deadline):
                request.Cancel()
                request.Wait()
                return False
        return True
