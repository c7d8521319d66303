"""Hierarchical collective operations: through shared memory within nodes, by MPI between nodes.

all_reduce:
    within each node   reduce_scatter    each rank receives its node's sum of one slice
    between nodes      MPI_Allreduce     of that slice, among the ranks that have the same slice on the other nodes
    within each node   all_gather        of the slices

reduce_scatter has the first two steps, all_gather the last two; the slice of a rank consists of its blocks and those
of the ranks that have its rank on the other nodes. broadcast sends each slice between nodes by another rank:
    within root's node   broadcast       of the tensor
    between nodes        MPI_Bcast       of each rank's slice
    within other nodes   all_gather      of the slices

The sums of a node are sent in the wide dtype, and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpicomm import agreement, mpi
from mpicomm.shm.interface import Comparison, OrderedSum, ShmCollectives, compare, divide

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype, Intracomm

_PIECE_BYTES = 2**26  # of a tensor, reduced at a time: this limits the memory for the slices' sums

_COMPARED = 0  # the call of an operation within a node, whose ranks have compared theirs before


class HierarchicalCollectives:
    """The operations of a communicator whose ranks are on several nodes, with equally many ranks on each."""

    def __init__(self, comm: Intracomm, node: ShmCollectives, across: Intracomm) -> None:
        """Combine the two levels (collective).

        Args:
            comm: The communicator of all ranks.
            node: The collective operations of this node's ranks.
            across: The communicator of the ranks that have the same rank on their nodes, in the order of the nodes.
        """
        self._comm = comm
        self._node = node
        self._across = across
        self.is_by_node = agreement.all_true(comm, comm.rank == across.rank * node.size + node.rank)
        """Whether the ranks of each node are consecutive, as all operations but `all_reduce` require."""

    def compare(self, flat: torch.Tensor, call: int) -> Comparison:
        """Compare the tensors and calls of all ranks (collective)."""
        return compare(self._comm, self._node.can_take(flat), flat.nbytes, call)

    def all_reduce(self, flat: torch.Tensor, how: OrderedSum, datatype: Datatype) -> None:
        """All-reduce in place.

        Args:
            datatype: The MPI datatype of the sum between nodes: that of the wide dtype, or else of the tensor's own.
        """
        for piece in flat.split(_PIECE_BYTES // flat.element_size()):
            slices = piece.tensor_split(self._node.size)
            mine = slices[self._node.rank]
            total = torch.empty_like(mine, dtype=how.wide)
            # Required before each operation: exchanges addresses, and synchronises the ranks.
            self._node.compare(piece, _COMPARED)
            self._node.reduce_scatter(piece, total, OrderedSum(how.wide))
            self._across.Allreduce(mpi.api().IN_PLACE, _spec(total, datatype), mpi.api().SUM)
            if how.divisor != 1:
                divide(total, how.divisor)
            mine.copy_(total)
            self._all_gather_in_node(piece)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: OrderedSum, datatype: Datatype) -> None:
        """Reduce a tensor with a block for each rank; `out` receives this rank's block.

        Args:
            datatype: The MPI datatype of the sum between nodes, as for `all_reduce`.
        """
        totals = torch.empty(self._across.size, out.numel(), dtype=how.wide or flat.dtype, device="cpu")
        for blocks, total in zip(flat.chunk(self._across.size), totals, strict=True):
            self._node.compare(blocks, _COMPARED)
            self._node.reduce_scatter(blocks, total, OrderedSum(how.wide))
        result = torch.empty_like(totals[0])
        blocks_spec = (_memory(totals), out.numel(), datatype)
        self._across.Reduce_scatter_block(blocks_spec, _spec(result, datatype), mpi.api().SUM)
        if how.divisor != 1:
            divide(result, how.divisor)
        out.copy_(result)

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill a tensor that has a block for each rank with each rank's own block."""
        of_nodes = flat.view(torch.uint8).chunk(self._across.size)
        nbytes = of_nodes[0].numel() // self._node.size
        mine = [blocks[self._node.rank * nbytes :][:nbytes] for blocks in of_nodes]
        gathered = torch.stack(mine)
        self._across.Allgather(mpi.api().IN_PLACE, (_memory(gathered), nbytes, mpi.api().BYTE))
        for blocks, own, block in zip(of_nodes, mine, gathered, strict=True):
            own.copy_(block)
            self._all_gather_in_node(blocks)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to the other ranks."""
        node_of_root, place = divmod(root, self._node.size)
        is_with_root = self._across.rank == node_of_root
        for piece in flat.view(torch.uint8).split(_PIECE_BYTES):
            if is_with_root:
                self._node.compare(piece, _COMPARED)
                self._node.broadcast(piece, place)
            mine = piece.tensor_split(self._node.size)[self._node.rank]
            self._across.Bcast((_memory(mine), mine.numel(), mpi.api().BYTE), node_of_root)
            if not is_with_root:
                self._all_gather_in_node(piece)

    def _all_gather_in_node(self, flat: torch.Tensor) -> None:
        """Fill a tensor, split among the node's ranks as by torch.tensor_split, with each rank's own part."""
        self._node.compare(flat, _COMPARED)
        self._node.all_gather(flat)


def _memory(tensor: torch.Tensor) -> object:
    return mpi.api().memory.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _spec(tensor: torch.Tensor, datatype: Datatype) -> tuple[object, int, Datatype]:
    return _memory(tensor), tensor.numel(), datatype
