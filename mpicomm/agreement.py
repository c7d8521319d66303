"""Agreement between ranks: errors that every rank raises, conditions that are true on all ranks, values that are equal.

The functions communicate by an mpi4py communicator, or by the gather function that they get, which torch has as well.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mpicomm import mpi
from mpicomm.errors import MpicommError, raised_on_all_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

S = TypeVar("S")
T = TypeVar("T")

AllGather = Callable[[Any], Sequence[Any]]
"""Returns the objects of all ranks, such as `comm.allgather` of mpi4py or `all_gather_object`."""


# -- errors ----------------------------------------------------------------------------------------------------------


def run_on_rank_0(comm: Intracomm, function: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on every rank (collective).

    Raises:
        MpicommError: On every rank, if the function raises one.
    """
    result, error = _attempt(function) if comm.rank == 0 else (None, None)
    result, error = comm.bcast((result, error))
    if error is not None:
        raise raised_on_all_ranks(error) if comm.size > 1 else error
    return result


def decide_on_rank_0(comm: Intracomm, collect: Callable[[], S], decide: Callable[[list[S]], T]) -> T:
    """Call `collect` on every rank, and `decide` with all results on rank 0, whose result every rank gets (collective).

    Raises:
        MpicommError: On every rank, if `collect` raises one on any rank, or `decide` on rank 0. The message names the
            lowest failing rank, unless all ranks have failed.
    """
    gathered = comm.gather(_attempt(collect))

    def check_and_decide() -> T:
        assert gathered is not None
        failed = [(rank, error) for rank, (_, error) in enumerate(gathered) if error is not None]
        if failed:
            rank, error = failed[0]
            raise error if len(failed) == comm.size else type(error)(f"rank {rank}: {error}")
        return decide([result for result, _ in gathered])

    return run_on_rank_0(comm, check_and_decide)


def failures(all_gather: AllGather, function: Callable[[], object], *kinds: type[Exception]) -> list[tuple[int, str]]:
    """Call a function on every rank, and return on all ranks which ranks failed, and their messages (collective).

    Args:
        kinds: The exception types that count as failures; others propagate.
    """
    failure = None
    try:
        function()
    except kinds as error:
        failure = str(error) or type(error).__name__
    return [(rank, message) for rank, message in enumerate(all_gather(failure)) if message is not None]


def run_on_all_ranks(
    all_gather: AllGather,
    function: Callable[[], object],
    kind: type[Exception],
    explain: Callable[[int, str], MpicommError],
) -> None:
    """Call a function on every rank; if it fails on any rank, raise an error on every rank (collective).

    Args:
        kind: The exception type that counts as a failure; others propagate.
        explain: Returns the error to raise, from the first failing rank and its message.
    """
    if failed := failures(all_gather, function, kind):
        raise raised_on_all_ranks(explain(*failed[0]))


def _attempt(function: Callable[[], T]) -> tuple[T | None, MpicommError | None]:
    try:
        return function(), None
    except MpicommError as error:
        return None, error


# -- values ----------------------------------------------------------------------------------------------------------


def minimum(comm: Intracomm, values: Sequence[int]) -> array[int]:
    """Return the element-wise minimum of integers over all ranks (collective)."""
    least = array("q", values)
    comm.Allreduce(mpi.api().IN_PLACE, least, mpi.api().MIN)
    return least


def all_true(comm: Intracomm, condition: bool) -> bool:
    """Return whether a condition is true on all ranks (collective)."""
    return bool(minimum(comm, [condition])[0])


def digest(content: bytes) -> tuple[int, int]:
    """Return a digest as two integers of 63 bits, whose negations are integers of 64 bits, too."""
    raw = hashlib.blake2b(content, digest_size=16).digest()
    return int.from_bytes(raw[:8], "big") >> 1, int.from_bytes(raw[8:], "big") >> 1


def extremes(values: Iterable[int]) -> list[int]:
    """Return the values and their negations: their element-wise minimum over the ranks shows whether they are equal."""
    listed = list(values)
    return [*listed, *[-value for value in listed]]


def all_equal(least: Sequence[int]) -> bool:
    """Return whether the values of all ranks are equal, from the minimum of their `extremes` over the ranks."""
    half = len(least) // 2
    return all(least[index] == -least[half + index] for index in range(half))


def ranks_by_value(values: Iterable[T], ranks: Iterable[int]) -> dict[T, list[int]]:
    """Return the ranks that have each value, in the order of the values."""
    ranks_of: dict[T, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


# -- after failures --------------------------------------------------------------------------------------------------


def succeeded_on_all(comm: Intracomm, is_done: bool) -> bool:
    """Return whether a step is done on all processes, and none has failed (collective, also if `comm` is revoked)."""
    try:
        return bool(comm.Agree(is_done))
    except mpi.api().Exception:  # of all processes: one has failed
        return False
