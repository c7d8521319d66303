"""A hierarchical all-reduce: through shared memory within nodes, by MPI between nodes.

    within each node   reduce_scatter    each rank receives its node's sum of one slice
    between nodes      MPI_Allreduce     of that slice, among the ranks that have the same slice on the other nodes
    within each node   all_gather        of the slices

The sums of a node are sent in the wide dtype, and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpicomm import mpi
from mpicomm.shm.interface import Comparison, OrderedSum, ShmCollectives, compare, divide

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype, Intracomm

_PIECE_BYTES = 2**26  # of a tensor, reduced at a time: this limits the memory for the slices' sums


class HierarchicalCollectives:
    """The all-reduce of a communicator whose ranks are on several nodes, with equally many ranks on each."""

    def __init__(self, comm: Intracomm, node: ShmCollectives, across: Intracomm) -> None:
        """Combine the two levels.

        Args:
            comm: The communicator of all ranks.
            node: The collective operations of this node's ranks.
            across: The communicator of the ranks that have the same rank on their nodes.
        """
        self._comm = comm
        self._node = node
        self._across = across

    def compare(self, flat: torch.Tensor) -> Comparison:
        """Compare the tensors of all ranks (collective)."""
        return compare(self._comm, self._node.can_take(flat), flat.nbytes)

    def reduce(self, flat: torch.Tensor, how: OrderedSum, datatype: Datatype) -> None:
        """All-reduce in place.

        Args:
            datatype: The MPI datatype of the sum between nodes: that of the wide dtype, or else of the tensor's own.
        """
        for piece in flat.split(_PIECE_BYTES // flat.element_size()):
            slices = piece.tensor_split(self._node.size)
            mine = slices[self._node.rank]
            total = torch.empty_like(mine, dtype=how.wide)
            self._node.compare(piece)  # required before each operation; exchanges addresses, synchronises the ranks
            self._node.reduce_scatter(piece, total, OrderedSum(how.wide))
            memory = mpi.api().memory.fromaddress(total.data_ptr(), total.nbytes)
            self._across.Allreduce(mpi.api().IN_PLACE, (memory, total.numel(), datatype), mpi.api().SUM)
            if how.divisor != 1:
                divide(total, how.divisor)
            mine.copy_(total)
            self._node.compare(piece)
            self._node.all_gather(piece)
