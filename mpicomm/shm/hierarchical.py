"""An all-reduce in two levels: within nodes by memory that their ranks share, between nodes by MPI.

    within each node   reduce_scatter    each rank has its node's sum of one slice
    between nodes      MPI_Allreduce     of that slice, with the ranks that have the same one on the other nodes
    within each node   all_gather        of the slices

The sums of one node travel in the wide dtype, and are rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpicomm import mpi
from mpicomm.shm.interface import OrderedSum, ShmCollectives, divide

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype, Intracomm

_PIECE_BYTES = 2**26  # of a tensor, of which the slices' sums are there at a time


class HierarchicalCollectives:
    """The all-reduce of a communicator whose ranks are on several nodes, equally many on each."""

    def __init__(self, node: ShmCollectives, across: Intracomm) -> None:
        """Use the two levels.

        Args:
            across: Joins the ranks that have the same rank on their nodes.
        """
        self._node = node
        self._across = across

    def can_take(self, flat: torch.Tensor) -> bool:
        """Tell whether this rank's tensor is in memory that the others of its node can get at."""
        return self._node.can_take(flat)

    def reduce(self, flat: torch.Tensor, how: OrderedSum, datatype: Datatype) -> None:
        """Reduce in place on all ranks.

        Args:
            datatype: What MPI adds up: the wide dtype, or else the tensor's own.
        """
        for piece in flat.split(_PIECE_BYTES // flat.element_size()):
            slices = piece.tensor_split(self._node.size)
            mine = slices[self._node.rank]
            total = torch.empty_like(mine, dtype=how.wide)
            self._node.reduce_scatter(piece, total, OrderedSum(how.wide))
            memory = mpi.api().memory.fromaddress(total.data_ptr(), total.nbytes)
            self._across.Allreduce(mpi.api().IN_PLACE, (memory, total.numel(), datatype), mpi.api().SUM)
            if how.divisor != 1:
                divide(total, how.divisor)
            mine.copy_(total)
            self._node.all_gather(piece)
