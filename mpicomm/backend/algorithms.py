"""The algorithms of collectives, and the sizes from which each of them is used.

The sizes were measured (docs/performance.md) and are constant: the bits of a program's results must not depend on how
fast the machine was at startup.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

Least = Mapping[str, int]
"""The smallest size in bytes from which an algorithm is used; no row: never."""


class Algorithm(enum.Enum):
    """How a collective is computed."""

    MPI = "by MPI"
    SLOTS = "through slots in shared memory"
    HIERARCHICAL = "through shared memory within nodes, by MPI between nodes"
    UNKNOWN = "not known before the ranks have tried to share memory"


_KIB, _MIB = 2**10, 2**20
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")

ROWS = {operation: operation for operation in _REDUCTIONS}
"""The rows of reductions that are one MPI call."""

COMPOSITE_ROWS = {operation: f"{operation}, composite" for operation in _REDUCTIONS}
"""The rows of reductions for which MPI needs conversions before and after the call."""

SLOTS: Least = {
    **dict.fromkeys(ROWS.values(), 4 * _KIB),
    **dict.fromkeys(COMPOSITE_ROWS.values(), 0),
    "all_gather": 4 * _KIB,
    "broadcast": 4 * _KIB,
    "all_to_all": 4 * _KIB,
    # Blocks may differ in size, and only the root knows all of them.
    "gather": 0,
    "scatter": 0,
}
"""If all ranks are on one node."""

HIERARCHICAL: Least = {ROWS["all_reduce"]: 8 * _MIB, COMPOSITE_ROWS["all_reduce"]: 8 * _MIB}
"""On several nodes, with several ranks on each."""

_NEVER = (math.inf, Algorithm.MPI)


class Choices:
    """The algorithms of one group, and the sizes from which it uses each."""

    def __init__(self, size: int) -> None:
        """Select `UNKNOWN` from the smallest size of each row on; if the group has one rank, always MPI."""
        self._by_row: dict[str | None, tuple[float, Algorithm]] = {}
        if size > 1:
            self.replace(Algorithm.UNKNOWN, SLOTS)

    def clear(self) -> None:
        """Select MPI for all sizes."""
        self._by_row.clear()

    def replace(self, algorithm: Algorithm, table: Least) -> None:
        """Select an algorithm from the sizes of a table on, and MPI for all others."""
        self._by_row = {row: (least, algorithm) for row, least in table.items()}

    def select(self, row: str | None, nbytes: int) -> Algorithm:
        """Return the algorithm of an operation.

        Args:
            row: The row of the operation in the tables; None if it has no row.
            nbytes: Size of the larger of a rank's tensors, equal on all ranks.
        """
        least, algorithm = self._by_row.get(row, _NEVER)
        return algorithm if nbytes >= least else Algorithm.MPI
