"""The selection of algorithms by size and reduction."""

from __future__ import annotations

import pytest

from mpicomm.backend import algorithms
from mpicomm.backend.algorithms import Algorithm, Choices, Sums

KIB = 2**10
SIZES = [0, 4, 4 * KIB - 1, 4 * KIB, 64 * KIB, 128 * KIB, 512 * KIB, 512 * KIB + 1, 2**24]
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")


def on_one_node(size: int, slot_bytes: float = 512 * KIB, *, is_native: bool = False) -> Choices:
    choices = Choices(size)
    choices.clear()
    if is_native:
        choices.add(Algorithm.SLOTS, algorithms.NATIVE_SLOTS)
        return choices
    choices.add(Algorithm.SLOTS, algorithms.TORCH_SLOTS, slot_bytes)
    choices.add(Algorithm.PEER_MEMORY, algorithms.PEER_MEMORY)
    return choices


@pytest.mark.parametrize("operation", REDUCTIONS)
@pytest.mark.parametrize("kind", [Sums.ORDINARY, Sums.COMPOSITE])
@pytest.mark.parametrize(("size", "slot_bytes"), [(3, 512 * KIB), (256, 128 * KIB)])
def test_more_than_two_ranks_add_in_rank_order_with_and_without_the_library(
    operation: str, kind: Sums, size: int, slot_bytes: int
) -> None:
    name = algorithms.rows(kind)[operation]
    native, other = on_one_node(size, is_native=True), on_one_node(size, slot_bytes)
    for nbytes in (*SIZES, slot_bytes, slot_bytes + 1):
        by_mpi = native.select(name, nbytes) is Algorithm.MPI
        assert (other.select(name, nbytes) is Algorithm.MPI) == by_mpi


@pytest.mark.parametrize("operation", REDUCTIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_integers_take_slots_only_where_these_are_faster(operation: str, size: int) -> None:
    name, choices = algorithms.rows(Sums.INTEGER)[operation], on_one_node(size)
    found = {nbytes: choices.select(name, nbytes) for nbytes in (64 * KIB, 128 * KIB, 512 * KIB, 512 * KIB + 1)}
    assert list(found.values()) == [Algorithm.MPI, Algorithm.SLOTS, Algorithm.SLOTS, Algorithm.PEER_MEMORY]


@pytest.mark.parametrize("size", [2, 3])
def test_memory_is_shared_at_the_smallest_size_that_uses_it(size: int) -> None:
    choices = Choices(size)
    for name in algorithms.NATIVE_SLOTS:
        least = algorithms.NATIVE_SLOTS[name][size > 2]
        assert choices.select(name, int(least)) is Algorithm.UNKNOWN
        assert not least or choices.select(name, int(least) - 1) is Algorithm.MPI
    assert Choices(1).select("all_reduce", 2**30) is Algorithm.MPI
