"""The agreement of ranks on errors and values; threads simulate the ranks."""

from __future__ import annotations

import concurrent.futures
import threading
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm import agreement, mpi
from mpicomm.errors import DeviceError, LaunchError, MpicommError
from tests.time_limits import scaled

SIZE = 3
WORDS = st.integers(-(2**63) + 1, 2**63 - 1)


class Comm:
    """The communicator of one of three ranks."""

    size = SIZE

    def __init__(self, rank: int, barrier: threading.Barrier, shared: dict[int, Any]) -> None:
        self.rank, self._barrier, self._shared = rank, barrier, shared

    def allgather(self, mine: object) -> list[Any]:
        self._shared[self.rank] = mine
        self._barrier.wait()
        found = [self._shared[rank] for rank in range(SIZE)]
        self._barrier.wait()
        return found

    def gather(self, mine: object) -> list[Any] | None:
        found = self.allgather(mine)
        return found if self.rank == 0 else None

    def bcast(self, mine: object) -> Any:
        return self.allgather(mine)[0]

    def Allreduce(self, in_place: object, values: array[int], operation: object) -> None:  # noqa: N802
        assert (in_place, operation) == (mpi.api().IN_PLACE, mpi.api().MIN)
        values[:] = array("q", map(min, zip(*self.allgather(values.tolist()), strict=True)))


def on_ranks(function: Callable[[Any], object]) -> list[object]:
    """Return what the function returns or raises on every rank."""
    barrier, shared = threading.Barrier(SIZE, timeout=scaled(10)), {}

    def run(rank: int) -> object:
        try:
            return function(Comm(rank, barrier, shared))
        except MpicommError as error:
            return type(error), str(error), error.is_on_all_ranks

    with concurrent.futures.ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


def fail(error: Exception) -> Any:
    raise error


def test_every_rank_gets_the_result_of_rank_0() -> None:
    assert on_ranks(lambda comm: agreement.run_on_rank_0(comm, lambda: comm.rank + 7)) == [7] * SIZE


def test_every_rank_raises_the_error_of_rank_0() -> None:
    raised = on_ranks(lambda comm: agreement.run_on_rank_0(comm, lambda: fail(LaunchError("no port"))))
    assert raised == [(LaunchError, "no port", True)] * SIZE


def test_rank_0_decides_from_the_facts_of_all_ranks() -> None:
    assert on_ranks(lambda comm: agreement.decide_on_rank_0(comm, lambda: comm.rank, sum)) == [3] * SIZE


@pytest.mark.parametrize(
    ("failing", "message"), [({1, 2}, "rank 1: no GPU 1"), ({2}, "rank 2: no GPU 2"), ({0, 1, 2}, "no GPU 0")]
)
def test_the_error_of_the_lowest_failing_rank_is_raised_on_every_rank(failing: set[int], message: str) -> None:
    def collect(comm: Any) -> None:
        if comm.rank in failing:
            raise DeviceError(f"no GPU {comm.rank}")

    raised = on_ranks(lambda comm: agreement.decide_on_rank_0(comm, lambda: collect(comm), fail))
    assert raised == [(DeviceError, message, True)] * SIZE


def test_failures_are_known_on_every_rank() -> None:
    def act(comm: Any) -> None:
        if comm.rank:
            raise OSError("full" if comm.rank == 1 else "")

    found = on_ranks(lambda comm: agreement.failures(comm.allgather, lambda: act(comm), OSError))
    assert found == [[(1, "full"), (2, "OSError")]] * SIZE


def test_an_error_explains_the_first_failure() -> None:
    def explain(rank: int, why: str) -> MpicommError:
        return MpicommError(f"rank {rank} cannot write: {why}")

    def act(comm: Any) -> None:
        if comm.rank == 1:
            raise OSError("full")

    raised = on_ranks(lambda comm: agreement.run_on_all_ranks(comm.allgather, lambda: act(comm), OSError, explain))
    assert raised == [(MpicommError, "rank 1 cannot write: full", True)] * SIZE


def test_a_condition_is_true_if_it_is_on_all_ranks() -> None:
    assert on_ranks(lambda comm: agreement.all_true(comm, comm.rank != 1)) == [False] * SIZE
    assert on_ranks(lambda comm: agreement.all_true(comm, comm.rank < SIZE)) == [True] * SIZE


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
def test_values_are_equal_if_the_least_extremes_are(values: list[tuple[int, int]]) -> None:
    least = [min(each) for each in zip(*map(agreement.extremes, values), strict=True)]
    assert agreement.all_equal(least) == (len(set(values)) == 1)


@given(st.binary(max_size=8))
def test_a_digest_and_its_negation_fit_into_64_bits(content: bytes) -> None:
    assert all(0 <= word < 2**63 for word in agreement.digest(content))


def test_ranks_are_grouped_by_their_values() -> None:
    assert agreement.ranks_by_value("bab", [4, 5, 7]) == {"b": [4, 7], "a": [5]}
