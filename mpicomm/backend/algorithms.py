"""The algorithms of collectives, and the sizes from which each of them is used.

The sizes were measured (docs/performance.md) and are constant: the bits of a program's results must not depend on how
fast the machine was at startup. More than two ranks have equal bits with and without the C library only if both add in
rank order at the same sizes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping

Least = Mapping[str, tuple[float, float]]
"""The smallest size in bytes from which an algorithm is used, for two ranks and for more; no row: never."""


class Algorithm(enum.Enum):
    """How a collective is computed."""

    MPI = "by MPI"
    SLOTS = "through slots in shared memory"
    PEER_MEMORY = "by access to the tensors of the other ranks"
    HIERARCHICAL = "through shared memory within nodes, by MPI between nodes"
    UNKNOWN = "not known before the ranks have tried to share memory"


class Sums(enum.Enum):
    """The kinds of reductions that differ in their thresholds."""

    ORDINARY = "one MPI call, whose bits depend on the order of the sum"
    INTEGER = "one MPI call, with the same bits in any order"
    COMPOSITE = "conversions before and after the MPI call"


_KIB, _MIB = 2**10, 2**20
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")


def rows(kind: Sums) -> Mapping[str, str]:
    """Return the row of each reduction in the tables."""
    return {operation: operation if kind is Sums.ORDINARY else f"{operation}, {kind.name}" for operation in _REDUCTIONS}


def _each(operations: Iterable[str], kinds: Iterable[Sums], least: tuple[float, float]) -> Least:
    return {rows(kind)[operation]: least for operation in operations for kind in kinds}


# The tables                                  two ranks     more ranks

NATIVE_SLOTS: Least = {
    **_each(_REDUCTIONS, [Sums.ORDINARY],    (4 * _KIB,     4 * _KIB)),
    **_each(_REDUCTIONS, [Sums.INTEGER],     (4 * _KIB,     4 * _KIB)),
    **_each(_REDUCTIONS, [Sums.COMPOSITE],   (0,            0)),
    "all_gather":                            (4 * _KIB,     4 * _KIB),
    "broadcast":                             (4 * _KIB,     4 * _KIB),
    "all_to_all":                            (4 * _KIB,     4 * _KIB),
    # Blocks may differ in size, and only the root knows all of them.
    "gather":                                (0,            0),
    "scatter":                               (0,            0),
}  # fmt: skip
"""Slots with the C library."""

TORCH_SLOTS: Least = {
    # MPI is faster below. More ranks must add in rank order from the sizes of NATIVE_SLOTS on.
    **_each(_REDUCTIONS, [Sums.ORDINARY],    (128 * _KIB,   4 * _KIB)),
    **_each(_REDUCTIONS, [Sums.INTEGER],     (128 * _KIB,   128 * _KIB)),
    **_each(_REDUCTIONS, [Sums.COMPOSITE],   (128 * _KIB,   0)),
}  # fmt: skip
"""Slots without it."""

PEER_MEMORY: Least = {
    # Above the size of a slot, which is less than 512 KiB only with more than 64 ranks on a node.
    **_each(_REDUCTIONS, [Sums.ORDINARY],    (512 * _KIB,   16 * _KIB)),
    **_each(_REDUCTIONS, [Sums.INTEGER],     (512 * _KIB,   512 * _KIB)),
    **_each(_REDUCTIONS, [Sums.COMPOSITE],   (512 * _KIB,   16 * _KIB)),
    # Between two ranks, MPI's own copy is as direct.
    "all_gather":                            (math.inf,     64 * _MIB),
    "broadcast":                             (math.inf,     64 * _MIB),
}  # fmt: skip

ACROSS_NODES: Least = {
    **_each(["all_reduce"], Sums,            (512 * _KIB,   8 * _MIB)),
}  # fmt: skip

ACROSS_NODES_IN_ORDER: Least = {
    **_each(["reduce_scatter"], Sums,        (math.inf,     8 * _MIB)),
    "all_gather":                            (math.inf,     8 * _MIB),
    "broadcast":                             (math.inf,     8 * _MIB),
}  # fmt: skip
"""If the ranks of each node are consecutive."""

_TABLES = (NATIVE_SLOTS, TORCH_SLOTS, PEER_MEMORY, ACROSS_NODES, ACROSS_NODES_IN_ORDER)


class Choices:
    """The algorithms of one group, and the sizes from which it uses each."""

    def __init__(self, size: int) -> None:
        """Select `UNKNOWN` from the smallest size of each row on; if the group has one rank, always MPI."""
        self._column = int(size > 2)
        self._by_row: dict[str, list[tuple[float, float, Algorithm]]] = {}
        for table in _TABLES if size > 1 else ():
            self.add(Algorithm.UNKNOWN, table)

    def clear(self) -> None:
        """Select MPI for all sizes."""
        self._by_row.clear()

    def add(self, algorithm: Algorithm, table: Least, most: float = math.inf) -> None:
        """Select an algorithm for the sizes of a table, at most `most`, for which none has been added before."""
        for name, for_sizes in table.items():
            least, entries = for_sizes[self._column], self._by_row.setdefault(name, [])
            if not any(each[0] <= least and most <= each[1] for each in entries):
                entries.append((least, most, algorithm))

    def select(self, name: str | None, nbytes: int) -> Algorithm:
        """Return the algorithm of an operation.

        Args:
            name: The row of the operation in the tables; None if it has no row.
            nbytes: Size of the larger of a rank's tensors, equal on all ranks.
        """
        for least, most, algorithm in self._by_row.get(name, ()):  # type: ignore[arg-type]
            if least <= nbytes <= most:
                return algorithm
        return Algorithm.MPI
