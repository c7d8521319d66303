"""A barrier with a timeout that names the missing ranks: of the start of a job, and torch's monitored barrier."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpicomm import mpi
from mpicomm.arguments import Deadline
from mpicomm.errors import RendezvousError, raised_on_all_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

# The barrier of the start is on the program's communicator: a tag that programs hardly use, below 32767, the least
# upper bound of tags that MPI guarantees.
_START_TAG = 32701
_NAMED = 16  # the most missing ranks that a message lists
_START_PAUSE = 0.01  # seconds between two polls at the start, where late ranks still import their program
_GRACE = 5.0  # seconds that a rank waits for rank 0's answer after its own timeout
# In place of the number of missing ranks:
_STILL_WAITING = -1  # an answer before the last one
_WITHDRAWN = -2  # a rank waits no longer for rank 0


class ReportingBarrier:
    """The barriers of one communicator. Every rank reports to rank 0, which answers it.

    Unlike MPI_Barrier, it returns on the ranks that have arrived even if others are missing, and the communicator
    remains usable.
    """

    def __init__(self, comm: Intracomm, tag: int, *, longest_pause: float) -> None:
        """Prepare the barriers.

        Args:
            comm: The communicator.
            tag: The tag of the messages, which no other code uses on this communicator.
            longest_pause: The longest pause between two polls, in seconds.
        """
        self._comm, self._tag, self._mpi = comm, tag, mpi.api()
        self._longest_pause = longest_pause
        self._number = 0  # of the barrier: a late message of one barrier must not count for the next
        self._reached = [0] * comm.size  # on rank 0: the last barrier that each rank has reported
        self._sent: list[tuple[Request, array[int]]] = []  # pending sends, possibly never received, and their buffers

    def begin(self) -> None:
        """Begin the next barrier; on ranks other than 0, report it to rank 0."""
        self._number += 1
        self._reached[0] = self._number
        if self._comm.rank:
            self._send(0, 0, [])

    def missing(self, deadline: Deadline, *, acknowledges: bool = False) -> list[int]:
        """Wait on rank 0 until all ranks have arrived, and return those that have not before the deadline.

        Args:
            deadline: The end of the wait.
            acknowledges: Answer each rank that arrives that rank 0 still waits.
        """

        def have_all_arrived() -> bool:
            while (received := self._receive()) is not None:
                rank, (number, count, *_) = received
                self._reached[rank] = 0 if count == _WITHDRAWN else number
                if acknowledges:
                    self._send(rank, _STILL_WAITING, [])
            return min(self._reached) >= self._number

        mpi.poll(have_all_arrived, deadline, longest_pause=self._longest_pause)
        return [rank for rank, number in enumerate(self._reached) if number < self._number]

    def answer(self, count: int, named: Sequence[int]) -> None:
        """Send the ranks that have arrived the number of missing ranks and the first of these, from rank 0."""
        for rank, number in enumerate(self._reached):
            if rank and number >= self._number:
                self._send(rank, count, named)

    def receive_answer(self, deadline: Deadline) -> tuple[int, list[int]] | None:
        """Return the next answer of rank 0; None if it has not arrived before the deadline."""
        answers: list[array[int]] = []

        def has_answered() -> bool:
            while not answers and (received := self._receive()) is not None:
                if received[1][0] == self._number:
                    answers.append(received[1])
            return bool(answers)

        if not mpi.poll(has_answered, deadline, longest_pause=self._longest_pause):
            return None
        _, count, *ranks = answers[0]
        return count, ranks[: min(max(count, 0), _NAMED)]

    def withdraw(self) -> None:
        """Report to rank 0 that this rank waits no longer.

        Otherwise rank 0 would count it as present if it waits later, perhaps in the next barrier of this number.
        """
        self._send(0, _WITHDRAWN, [])

    def complete_sends(self) -> None:
        """Wait until all messages of this rank have been sent."""
        self._mpi.Request.Waitall([request for request, _ in self._sent])

    def _send(self, rank: int, count: int, ranks: Sequence[int]) -> None:
        message = array("q", [self._number, count, *ranks[:_NAMED]])
        message.extend([0] * (2 + _NAMED - len(message)))
        self._sent = [(request, memory) for request, memory in self._sent if not request.Test()]
        self._sent.append((self._comm.Isend(message, rank, self._tag), message))

    def _receive(self) -> tuple[int, array[int]] | None:
        """Return the next message that has arrived and its sender; None if there is none."""
        status = self._mpi.Status()
        if not self._comm.Iprobe(self._mpi.ANY_SOURCE, self._tag, status):
            return None
        message = array("q", [0] * (2 + _NAMED))
        self._comm.Recv(message, status.source, self._tag)
        return status.source, message


@dataclasses.dataclass(frozen=True)
class MissingNotice:
    """The notice about missing ranks, printed before the timeout."""

    seconds: float
    """Seconds to wait before it is printed."""

    write: Callable[[str], None]


def wait_for_all_ranks(
    comm: Intracomm, phase: str, timeout: float, notice: MissingNotice, hosts: tuple[str, ...] = ()
) -> None:
    """Wait at the start of a job until every rank has called this function (collective).

    Args:
        comm: The communicator.
        phase: The operation in which the ranks wait, for messages.
        timeout: Seconds to wait.
        notice: Printed with the missing ranks before the timeout.
        hosts: The host of every rank; empty if not known yet.

    Raises:
        RendezvousError: If ranks are missing after `timeout` seconds; the message lists them by rank and host.
    """

    def print_notice(missing: Sequence[int]) -> None:
        notice.write(
            f"[mpicomm] rank {comm.rank} of {comm.size}{_on(comm.rank, hosts)} has waited {notice.seconds:g} s in "
            f"{phase} for {_listed(len(missing), missing, hosts)}.\n"
            f"The job is aborted after {timeout:g} s; bootstrap(timeout=...) changes this limit.\n"
            f"Check that every rank calls mpicomm.bootstrap(), and where the missing ranks block before it.\n"
        )

    barrier = ReportingBarrier(comm, _START_TAG, longest_pause=_START_PAUSE)
    barrier.begin()
    # 1. print the missing ranks after a part of the timeout, then wait until the timeout
    first = Deadline(min(notice.seconds, timeout) + (_GRACE if comm.rank else 0))
    if comm.rank == 0:
        missing = barrier.missing(first)
        if missing:
            print_notice(missing)
            barrier.answer(_STILL_WAITING, [])
            missing = barrier.missing(Deadline(timeout - notice.seconds), acknowledges=True)
        barrier.answer(len(missing), missing)
        count = len(missing)
    else:
        answer = barrier.receive_answer(first)
        if answer is None and comm.rank == 1:  # one rank prints for all
            print_notice([0])
        rest = Deadline(timeout + _GRACE - first.count_up())
        while (answer is None or answer[0] == _STILL_WAITING) and rest.count_down() > 0:
            answer = barrier.receive_answer(rest) or answer
        if answer is None or answer[0] == _STILL_WAITING:
            barrier.withdraw()
            raise RendezvousError(
                f"{phase}: timed out after {timeout + _GRACE:.0f} s waiting for rank 0{_at(0, hosts)}.\n"
                f"Check the output of rank 0: it is blocked, or needs a longer bootstrap(timeout=...)."
            )
        count, missing = answer
    # 2. raise the same error on all ranks
    barrier.complete_sends()
    if count:
        raise raised_on_all_ranks(error_of(phase, timeout, comm.size, count, missing, hosts))


def error_of(
    phase: str, timeout: float, size: int, count: int, missing: Sequence[int], hosts: tuple[str, ...] = ()
) -> RendezvousError:
    """Return the error of ranks that wait for others.

    Args:
        phase: The operation in which they wait.
        timeout: The seconds that they have waited.
        size: The number of ranks of the job.
        count: The number of missing ranks.
        missing: The missing ranks, or the first of them.
        hosts: The host of every rank; empty if not known.
    """
    return RendezvousError(
        f"{phase}: timed out after {timeout:.0f} s: {count} of {size} ranks did not arrive: "
        f"{_listed(count, missing, hosts)}.\n"
        f"Check what these ranks execute before bootstrap(), or increase bootstrap(timeout=...)."
    )


def _listed(count: int, ranks: Sequence[int], hosts: tuple[str, ...]) -> str:
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    return ", ".join(f"rank {rank}{_at(rank, hosts)}" for rank in ranks[:_NAMED]) + more


def _at(rank: int, hosts: tuple[str, ...]) -> str:
    return _on(rank, hosts) or " (host unknown: it has not called bootstrap)"


def _on(rank: int, hosts: tuple[str, ...]) -> str:
    return f" on {hosts[rank]}" if hosts else ""
