"""The selection of algorithms by size and reduction."""

from __future__ import annotations

from unittest import mock

import pytest

from mpicomm import mpi
from mpicomm.backend.transfer import algorithms
from mpicomm.backend.transfer.algorithms import Algorithm, Choices
from mpicomm.settings import Settings

MIB = 2**20
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
MOVEMENTS = ("all_gather", "broadcast", "all_to_all", "gather", "scatter")
CONVERTED_REDUCTIONS = tuple(f"{operation}, converted" for operation in REDUCTIONS)
TABLES = {
    Algorithm.SLOTS: algorithms.SLOT_OPERATIONS,
    Algorithm.HIERARCHICAL: algorithms.HIERARCHICAL_OPERATIONS,
}


@pytest.mark.parametrize("size", [2, 3])
def test_memory_is_shared_at_the_smallest_size_that_uses_it(size: int) -> None:
    choices = Choices(size)
    for row, least in (*algorithms.SLOT_OPERATIONS.items(), *algorithms.HIERARCHICAL_OPERATIONS.items()):
        assert choices.select(row, least) is Algorithm.UNKNOWN
        smallest = algorithms.SLOT_OPERATIONS[row]
        assert not smallest or choices.select(row, smallest - 1) is Algorithm.MPI
    assert Choices(1).select("all_reduce", 2**30) is Algorithm.MPI


def test_a_group_that_another_thread_destroys_ends_a_wait() -> None:
    selector = algorithms.AlgorithmSelector(mock.Mock(size=2), mock.Mock(), Settings())
    selector.close()
    with pytest.raises(RuntimeError, match="destroyed during the operation"):
        selector._advance()


def test_all_communicators_of_an_aborted_group_are_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    revoked: list[object] = []
    monkeypatch.setattr(mpi, "revoke", revoked.append)
    selector = algorithms.AlgorithmSelector(mock.Mock(size=2), mock.Mock(), Settings())
    selector._comms = [mock.Mock(), mock.Mock()]
    selector.revoke()
    assert revoked == selector._comms


# A change of a threshold changes the bits of the results of users' programs.
@pytest.mark.parametrize(
    ("algorithm", "operations", "least"),
    [
        (Algorithm.SLOTS, (*REDUCTIONS, *CONVERTED_REDUCTIONS, *MOVEMENTS), 0),
        (Algorithm.HIERARCHICAL, ("all_reduce", "all_reduce, converted"), 8 * MIB),
        (Algorithm.HIERARCHICAL, ("reduce", "reduce_scatter", "all_gather", "broadcast"), None),
    ],
)
def test_the_smallest_size_of_each_operation(
    algorithm: Algorithm, operations: tuple[str, ...], least: int | None
) -> None:
    choices = Choices(3)
    choices.replace(algorithm, TABLES[algorithm])
    for row in operations:
        assert choices.select(row, 2**40) is (Algorithm.MPI if least is None else algorithm)
        assert least is None or choices.select(row, least) is algorithm
        assert not least or choices.select(row, least - 1) is Algorithm.MPI


def test_an_operation_without_a_row_is_computed_by_mpi() -> None:
    choices = Choices(3)
    assert choices.select("barrier", 2**30) is Algorithm.MPI
