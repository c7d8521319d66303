"""A barrier with a timeout that reports the missing ranks by number and host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpicomm import mpi
from mpicomm.durations import Deadline
from mpicomm.errors import RendezvousError, raised_on_all_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

# Tags that no other code uses: the first call is made before mpicomm has a communicator of its own.
_ARRIVED, _VERDICT = 32701, 32702
_NAMED = 16  # the most missing ranks that a message lists
_LONGEST_PAUSE = 0.01  # seconds between two polls
_GRACE = 5.0  # seconds that a rank waits for rank 0's verdict after its own timeout


Verdict = tuple[int, list[int]]
"""The number of missing ranks, and the first of them."""

_RANK_0_IS_HERE = None  # sent before the verdict: rank 0 has printed the missing ranks and still waits


@dataclasses.dataclass(frozen=True)
class Notice:
    """The notice about missing ranks, printed before the timeout."""

    seconds: float
    """Seconds to wait before it is printed."""

    say: Callable[[str], None]


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

    def tell(missing: str) -> None:
        who = f"rank {comm.rank} of {comm.size}{_on(comm.rank, hosts)}"
        notice.say(
            f"[mpicomm] {who} has waited {notice.seconds:g} s in {phase} for {missing}.\n"
            f"The job is aborted after {timeout:g} s; bootstrap(timeout=...) changes this limit.\n"
            f"Check that every rank calls mpicomm.bootstrap(), and where the missing ranks block before it.\n"
        )

    if comm.rank == 0:
        verdict: Verdict | None = _preside(comm, timeout, notice.seconds, lambda missing: tell(_named(missing, hosts)))
    else:
        verdict = _attend(comm, timeout, notice.seconds, lambda: tell(_named((1, [0]), hosts)))
    if verdict is None:
        raise RendezvousError(
            f"{phase}: timed out after {timeout + _GRACE:.0f} s waiting for rank 0{_at(0, hosts)}.\n"
            f"Check the output of rank 0: it is blocked, or needs a longer bootstrap(timeout=...)."
        )
    if verdict[0]:
        raise raised_on_all_ranks(
            RendezvousError(
                f"{phase}: timed out after {timeout:.0f} s: {verdict[0]} of {comm.size} ranks did not arrive: "
                f"{_named(verdict, hosts)}.\n"
                f"Check what these ranks execute before bootstrap(), or increase bootstrap(timeout=...)."
            )
        )


def _preside(comm: Intracomm, timeout: float, seconds: float, tell: Callable[[Verdict], None]) -> Verdict:
    # 1. receive one byte of each rank: for pickled objects, mpi4py would allocate 32 KiB per rank
    requests = {rank: comm.Irecv(bytearray(1), source=rank, tag=_ARRIVED) for rank in range(1, comm.size)}
    sent: list[Request] = []

    def has_all(*, answers: bool = False) -> bool:
        for rank in _drop_arrived(requests):
            if answers:
                sent.append(comm.isend(_RANK_0_IS_HERE, dest=rank, tag=_VERDICT))
        return not requests

    # 2. print the missing ranks after `seconds`, then wait until the timeout
    if not mpi.poll(has_all, min(seconds, timeout), longest_pause=_LONGEST_PAUSE):
        tell(_verdict(requests))
        arrived = [rank for rank in range(1, comm.size) if rank not in requests]
        sent += [comm.isend(_RANK_0_IS_HERE, dest=rank, tag=_VERDICT) for rank in arrived]
        mpi.poll(lambda: has_all(answers=True), timeout - seconds, longest_pause=_LONGEST_PAUSE)
    # 3. send the verdict to the ranks that have arrived
    for request in requests.values():
        request.Cancel()
    verdict = _verdict(requests)
    sent += [comm.isend(verdict, dest=rank, tag=_VERDICT) for rank in range(1, comm.size) if rank not in requests]
    mpi.api().Request.waitall(sent)
    return verdict


def _attend(comm: Intracomm, timeout: float, seconds: float, tell: Callable[[], None]) -> Verdict | None:
    arrived = comm.Isend(b"!", dest=0, tag=_ARRIVED)
    answers: list[Verdict | None] = []

    def hears() -> bool:
        """Receive the next answer of rank 0, if one has arrived."""
        has_come = comm.iprobe(source=0, tag=_VERDICT)
        if has_come:
            answers.append(comm.recv(source=0, tag=_VERDICT))
        return has_come

    first = Deadline(min(seconds, timeout) + _GRACE)
    is_here = mpi.poll(hears, first, longest_pause=_LONGEST_PAUSE)
    if not is_here and comm.rank == 1:  # one rank prints for all
        tell()
    deadline = Deadline(timeout + _GRACE - first.passed())
    while (not answers or answers[-1] is _RANK_0_IS_HERE) and deadline.left() > 0:
        mpi.poll(hears, deadline, longest_pause=_LONGEST_PAUSE)
    if not answers or answers[-1] is None:
        return None
    arrived.Wait()
    return answers[-1]


def _drop_arrived(requests: dict[int, Request]) -> list[int]:
    arrived = [rank for rank, request in requests.items() if request.Test()]
    for rank in arrived:
        del requests[rank]
    return arrived


def _verdict(missing: dict[int, Request]) -> Verdict:
    return len(missing), sorted(missing)[:_NAMED]


def _named(verdict: Verdict, hosts: tuple[str, ...]) -> str:
    count, first = verdict
    more = f" and {count - len(first)} more" if count > len(first) else ""
    return ", ".join(f"rank {rank}{_at(rank, hosts)}" for rank in first) + more


def _at(rank: int, hosts: tuple[str, ...]) -> str:
    return _on(rank, hosts) or " (host unknown: it has not called bootstrap)"


def _on(rank: int, hosts: tuple[str, ...]) -> str:
    return f" on {hosts[rank]}" if hosts else ""
