"""A barrier with a timeout that reports the missing ranks by number and host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from mpicomm import mpi
from mpicomm.arguments import Deadline
from mpicomm.errors import RendezvousError, raised_on_all_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

# Tags that no other code uses: the call is made before mpicomm has a communicator of its own.
_ARRIVAL, _ANSWER = 32701, 32702
_NAMED = 16  # the most missing ranks that a message lists
_LONGEST_PAUSE = 0.01  # seconds between two polls
_GRACE = 5.0  # seconds that a rank waits for rank 0's answer after its own timeout


_STILL_WAITING = None  # an answer before the last one: rank 0 has printed the missing ranks and still waits


@dataclasses.dataclass(frozen=True)
class Notice:
    """The notice about missing ranks, printed before the timeout."""

    seconds: float
    """Seconds to wait before it is printed."""

    write: Callable[[str], None]


def startup_barrier(comm: Intracomm, phase: str, timeout: float, notice: Notice, hosts: tuple[str, ...] = ()) -> None:
    """Wait until every rank has called this function (collective).

    Every rank reports to rank 0, which answers each with the list of missing ranks. Unlike MPI_Barrier, it returns on
    the ranks that have arrived even if others are missing.

    Args:
        phase: The operation in which the ranks wait, for messages.
        timeout: Seconds to wait.
        notice: Printed with the missing ranks before the timeout.
        hosts: The host of every rank; empty if not known yet.

    Raises:
        RendezvousError: If ranks are missing after `timeout` seconds; the message lists them by rank and host.
    """

    def print_notice(missing: str) -> None:
        notice.write(
            f"[mpicomm] rank {comm.rank} of {comm.size}{_on(comm.rank, hosts)} has waited {notice.seconds:g} s in "
            f"{phase} for {missing}.\n"
            f"The job is aborted after {timeout:g} s; bootstrap(timeout=...) changes this limit.\n"
            f"Check that every rank calls mpicomm.bootstrap(), and where the missing ranks block before it.\n"
        )

    wait = _wait_for_all_ranks if comm.rank == 0 else _wait_for_rank_0
    missing = wait(comm, timeout, notice.seconds, print_notice, hosts)
    if missing is None:
        raise RendezvousError(
            f"{phase}: timed out after {timeout + _GRACE:.0f} s waiting for rank 0{_at(0, hosts)}.\n"
            f"Check the output of rank 0: it is blocked, or needs a longer bootstrap(timeout=...)."
        )
    if missing:
        raise raised_on_all_ranks(
            RendezvousError(
                f"{phase}: timed out after {timeout:.0f} s: {missing}.\n"
                f"Check what these ranks execute before bootstrap(), or increase bootstrap(timeout=...)."
            )
        )


def _wait_for_all_ranks(
    comm: Intracomm, timeout: float, seconds: float, print_notice: Callable[[str], None], hosts: tuple[str, ...]
) -> str:
    """Wait on rank 0 until all ranks have arrived; answer each, and return, which have not, or ""."""
    # 1. receive one byte of each rank: for pickled objects, mpi4py would allocate 32 KiB per rank
    requests = {rank: comm.Irecv(bytearray(1), source=rank, tag=_ARRIVAL) for rank in range(1, comm.size)}
    sent: list[Request] = []

    def answer(ranks: Iterable[int], text: str | None) -> None:
        sent.extend(comm.isend(text, dest=rank, tag=_ANSWER) for rank in ranks)

    def have_all_arrived(*, answers: bool = False) -> bool:
        arrived = [rank for rank, request in requests.items() if request.Test()]
        for rank in arrived:
            del requests[rank]
        if answers:
            answer(arrived, _STILL_WAITING)
        return not requests

    # 2. print the missing ranks after `seconds`, then wait until the timeout
    if not mpi.poll(have_all_arrived, min(seconds, timeout), longest_pause=_LONGEST_PAUSE):
        print_notice(_named(requests, hosts))
        answer(set(range(1, comm.size)) - requests.keys(), _STILL_WAITING)
        mpi.poll(lambda: have_all_arrived(answers=True), timeout - seconds, longest_pause=_LONGEST_PAUSE)
    # 3. send the missing ranks to those that have arrived
    for request in requests.values():
        request.Cancel()
    missing = f"{len(requests)} of {comm.size} ranks did not arrive: {_named(requests, hosts)}" if requests else ""
    answer(set(range(1, comm.size)) - requests.keys(), missing)
    mpi.api().Request.waitall(sent)
    return missing


def _wait_for_rank_0(
    comm: Intracomm, timeout: float, seconds: float, print_notice: Callable[[str], None], hosts: tuple[str, ...]
) -> str | None:
    """Report the arrival to rank 0, and return its last answer; None if rank 0 has not sent it in time."""
    arrival = comm.Isend(b"!", dest=0, tag=_ARRIVAL)
    answers: list[str | None] = []

    def has_received() -> bool:
        """Receive the next answer of rank 0, if one has arrived."""
        has_arrived = comm.iprobe(source=0, tag=_ANSWER)
        if has_arrived:
            answers.append(comm.recv(source=0, tag=_ANSWER))
        return has_arrived

    first = Deadline(min(seconds, timeout) + _GRACE)
    is_here = mpi.poll(has_received, first, longest_pause=_LONGEST_PAUSE)
    if not is_here and comm.rank == 1:  # one rank prints for all
        print_notice(_named([0], hosts))
    deadline = Deadline(timeout + _GRACE - first.count_up())
    while (not answers or answers[-1] is _STILL_WAITING) and deadline.count_down() > 0:
        mpi.poll(has_received, deadline, longest_pause=_LONGEST_PAUSE)
    if not answers or answers[-1] is _STILL_WAITING:
        return None
    arrival.Wait()
    return answers[-1]


def _named(ranks: Collection[int], hosts: tuple[str, ...]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(f"rank {rank}{_at(rank, hosts)}" for rank in sorted(ranks)[:_NAMED]) + more


def _at(rank: int, hosts: tuple[str, ...]) -> str:
    return _on(rank, hosts) or " (host unknown: it has not called bootstrap)"


def _on(rank: int, hosts: tuple[str, ...]) -> str:
    return f" on {hosts[rank]}" if hosts else ""
