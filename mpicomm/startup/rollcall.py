"""Who is missing: a barrier that names the ranks that did not come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicomm import mpi
from mpicomm.errors import RendezvousError, everywhere

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

# Tags: the first call is made before there is a private communicator, so they are ones that nobody else uses.
_ARRIVED, _VERDICT = 32701, 32702
_NAMED = 16  # how many of the missing are named
_LONGEST_PAUSE = 0.01  # seconds between two looks
_GRACE = 5.0  # seconds that a rank waits for rank 0's verdict after its own patience ends


Verdict = tuple[int, list[int]]
"""How many ranks are missing, and the first of them."""


def roll_call(comm: Intracomm, phase: str, timeout: float, hosts: tuple[str, ...] = ()) -> None:
    """Wait until every rank has come here (collective).

    Every rank reports to rank 0, which answers each with the list of the missing. Unlike a barrier, it ends on the
    ranks that are here.

    Args:
        phase: What the ranks come together for, for the message.
        timeout: Seconds to wait.
        hosts: The host of every rank, if it is known already.

    Raises:
        RendezvousError: If ranks are missing after `timeout` seconds; it names them by rank and host.
    """
    verdict = _preside(comm, timeout) if comm.rank == 0 else _attend(comm, timeout)
    if verdict is None:
        raise RendezvousError(
            f"{phase}: rank 0{_at(0, hosts)} did not answer within {timeout + _GRACE:.0f} s.\n"
            f"Look at rank 0's output: it stands still, or it is slower than the timeout allows."
        )
    count, first = verdict
    if count:
        names = ", ".join(f"rank {rank}{_at(rank, hosts)}" for rank in first)
        more = f" and {count - len(first)} more" if count > len(first) else ""
        raise everywhere(
            RendezvousError(
                f"{phase}: {count} of {comm.size} ranks did not come within {timeout:.0f} s: {names}{more}.\n"
                f"Look at what they do before bootstrap(), or raise bootstrap(timeout=...)."
            )
        )


def _preside(comm: Intracomm, timeout: float) -> Verdict:
    # One byte each: with pickles, mpi4py would set aside 32 KiB for every rank.
    requests = {rank: comm.Irecv(bytearray(1), source=rank, tag=_ARRIVED) for rank in range(1, comm.size)}
    mpi.poll(lambda: _drop_arrived(requests) == 0, timeout, longest_pause=_LONGEST_PAUSE)
    missing = sorted(requests)
    for request in requests.values():
        request.Cancel()
    verdict = (len(missing), missing[:_NAMED])
    sent = [comm.isend(verdict, dest=rank, tag=_VERDICT) for rank in range(1, comm.size) if rank not in requests]
    mpi.api().Request.waitall(sent)
    return verdict


def _attend(comm: Intracomm, timeout: float) -> Verdict | None:
    arrived = comm.Isend(b"!", dest=0, tag=_ARRIVED)
    verdict = comm.irecv(source=0, tag=_VERDICT)
    answer: list[Verdict] = []

    def heard() -> bool:
        done, said = verdict.test()
        if said is not None:
            answer.append(said)
        return done

    if not mpi.poll(heard, timeout + _GRACE, longest_pause=_LONGEST_PAUSE):
        return None
    arrived.Wait()
    return answer[0]


def _drop_arrived(requests: dict[int, Request]) -> int:
    for rank in [rank for rank, request in requests.items() if request.Test()]:
        del requests[rank]
    return len(requests)


def _at(rank: int, hosts: tuple[str, ...]) -> str:
    return f" on {hosts[rank]}" if hosts else " (host unknown: it has not come to bootstrap)"
