"""The selection of algorithms by size and reduction."""

from __future__ import annotations

import pytest

from mpicomm.backend import algorithms
from mpicomm.backend.algorithms import Algorithm, Choices, Sums

KIB, MIB = 2**10, 2**20
SIZES = [0, 4, 4 * KIB - 1, 4 * KIB, 64 * KIB, 128 * KIB, 512 * KIB, 512 * KIB + 1, 2**24]
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
REDUCTIONS_OF_INTEGERS = tuple(f"{operation}, INTEGER" for operation in REDUCTIONS)
COMPOSITE_REDUCTIONS = tuple(f"{operation}, COMPOSITE" for operation in REDUCTIONS)


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


# A change of a threshold changes the bits of the results of users' programs.
@pytest.mark.parametrize(
    ("table", "operations", "for_two", "for_more"),
    [
        ("NATIVE_SLOTS", REDUCTIONS, 4 * KIB, 4 * KIB),
        ("NATIVE_SLOTS", REDUCTIONS_OF_INTEGERS, 4 * KIB, 4 * KIB),
        ("NATIVE_SLOTS", COMPOSITE_REDUCTIONS, 0, 0),
        ("NATIVE_SLOTS", ("all_gather", "broadcast", "all_to_all"), 4 * KIB, 4 * KIB),
        ("NATIVE_SLOTS", ("gather", "scatter"), 0, 0),
        ("TORCH_SLOTS", REDUCTIONS, 128 * KIB, 4 * KIB),
        ("TORCH_SLOTS", REDUCTIONS_OF_INTEGERS, 128 * KIB, 128 * KIB),
        ("TORCH_SLOTS", COMPOSITE_REDUCTIONS, 128 * KIB, 0),
        ("TORCH_SLOTS", ("all_gather", "broadcast"), None, None),
        ("PEER_MEMORY", REDUCTIONS, 512 * KIB, 16 * KIB),
        ("PEER_MEMORY", REDUCTIONS_OF_INTEGERS, 512 * KIB, 512 * KIB),
        ("PEER_MEMORY", COMPOSITE_REDUCTIONS, 512 * KIB, 16 * KIB),
        ("PEER_MEMORY", ("all_gather", "broadcast"), None, 64 * MIB),
        ("ACROSS_NODES", ("all_reduce", "all_reduce, INTEGER", "all_reduce, COMPOSITE"), 512 * KIB, 8 * MIB),
        (
            "ACROSS_NODES_IN_ORDER",
            ("reduce_scatter", "reduce_scatter, INTEGER", "reduce_scatter, COMPOSITE", "all_gather", "broadcast"),
            None,
            8 * MIB,
        ),
    ],
)
def test_the_smallest_size_of_each_operation(
    table: str, operations: tuple[str, ...], for_two: int | None, for_more: int | None
) -> None:
    for size, least in ((2, for_two), (3, for_more)):
        choices = Choices(size)
        choices.clear()
        choices.add(Algorithm.SLOTS, getattr(algorithms, table))
        for name in operations:
            assert choices.select(name, 2**40) is (Algorithm.MPI if least is None else Algorithm.SLOTS)
            assert least is None or choices.select(name, least) is Algorithm.SLOTS
            assert not least or choices.select(name, least - 1) is Algorithm.MPI


def test_an_operation_without_a_row_is_computed_by_mpi() -> None:
    choices = Choices(3)
    assert choices.select(None, 2**30) is choices.select("barrier", 2**30) is Algorithm.MPI


def test_the_algorithm_that_was_added_first_is_selected() -> None:
    choices = Choices(2)
    choices.clear()
    table = {"gather": (8, 99)}
    choices.add(Algorithm.SLOTS, table, 16)
    choices.add(Algorithm.HIERARCHICAL, table, 16)  # adds no size
    choices.add(Algorithm.PEER_MEMORY, table, 32)
    selected = [choices.select("gather", nbytes) for nbytes in (7, 8, 16, 17, 32, 33)]
    by_mpi, slots, peer_memory = Algorithm.MPI, Algorithm.SLOTS, Algorithm.PEER_MEMORY
    assert selected == [by_mpi, slots, slots, peer_memory, peer_memory, by_mpi]
