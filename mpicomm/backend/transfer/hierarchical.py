"""The hierarchical all-reduce: through slots in shared memory within nodes, by MPI between nodes.

    within each node   reduce_scatter    each rank receives its node's sum of one block
    between nodes      MPI_Allreduce     of that block, among the ranks that have the same block on the other nodes
    within each node   all_gather        of the blocks

The sums of a node are sent in the wide dtype, and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpicomm import agreement
from mpicomm.backend.transfer import dtypes, mpi_calls
from mpicomm.backend.transfer.reductions import Reduction
from mpicomm.backend.transfer.slots import NativeSlots, different_calls, different_sizes
from mpicomm.native import c_library

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_PIECE_BYTES = 2**26  # of a tensor, reduced at a time: this limits the memory for sums in a wide dtype


class HierarchicalAllReduce:
    """The all-reduce of a communicator whose ranks are on several nodes, with equally many ranks on each."""

    def __init__(self, comm: Intracomm, node_slots: NativeSlots, across: Intracomm) -> None:
        """Combine the two levels.

        Args:
            comm: The communicator of all ranks, in any order on the nodes.
            node_slots: The slots of this node's ranks.
            across: The communicator of the ranks that have the same rank on their nodes.
        """
        self._comm = comm
        self._node_slots = node_slots
        self._across = across

    def run(self, dense: torch.Tensor, reduction: Reduction) -> bool:
        """All-reduce in place; return whether it ran: it does not if a rank's tensor is not on the host (collective).

        Raises:
            RuntimeError: On all ranks, if they call different operations, or with tensors of different sizes.
        """
        # 1. compare the calls of all ranks: in slots, the ranks of one node see only each other's
        call, nbytes = c_library.reducing(c_library.ALL_REDUCE, dense.dtype, divisor=reduction.divisor), dense.nbytes
        are_on_host, *published = agreement.minimum(self._comm, [dense.is_cpu, *agreement.extremes([nbytes, call])])
        if not agreement.all_equal(published):
            least_bytes, least_call, most_bytes, most_call = map(abs, published)
            raise different_calls() if least_call != most_call else different_sizes(least_bytes, most_bytes)
        if not are_on_host:
            return False
        # 2. reduce; the last elements, fewer than the node has ranks, are padded to one for each rank
        flat, size = dense.detach().view(-1), self._node_slots.size
        rest = flat[flat.numel() // size * size :]
        for piece in flat[: flat.numel() - rest.numel()].split(_PIECE_BYTES // flat.element_size() // size * size):
            self._all_reduce_piece(piece, reduction)
        if rest.numel():
            padded = torch.cat([rest, rest.new_zeros(size - rest.numel())])
            self._all_reduce_piece(padded, reduction)
            rest.copy_(padded[: rest.numel()])
        return True

    def _all_reduce_piece(self, piece: torch.Tensor, reduction: Reduction) -> None:
        """All-reduce a tensor that has a block for each rank of the node."""
        block = piece.view(self._node_slots.size, piece.numel() // self._node_slots.size)[self._node_slots.rank]
        # The slots add these in float32; MPI needs a wider dtype for some integers as well.
        is_narrow = block.dtype in dtypes.NARROW_FLOATS
        total = torch.empty_like(block, dtype=reduction.wide) if is_narrow else block
        self._node_slots.reduce_scatter(piece, total)
        if reduction.wide is not None:
            total = total.to(reduction.wide)
        mpi_calls.all_reduce(self._across, total, reduction.datatype, reduction.op)
        reduction.store(total, block)
        self._node_slots.all_gather(piece)
