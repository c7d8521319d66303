"""Large tensors' way through the memory of a node: which take it, and what happens where there is none.

A tensor takes it if it is large enough and its operation is one that torch's kernels can do. Both are equal on all
ranks, and constant: the bits of what a program computes must not depend on how fast a machine was at its start.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from mpicomm import mpi
from mpicomm.backend import dtypes
from mpicomm.backend.reductions import Reduction
from mpicomm.shm import cma, segment
from mpicomm.shm.hierarchical import HierarchicalCollectives
from mpicomm.shm.interface import OrderedSum, ShmCollectives
from mpicomm.watchdog import flight_recorder

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# Bytes from which on this way is faster than MPI's own, for two ranks and for more (docs/performance.md). Between two,
# MPI's own copy is as direct.
_LEAST_BYTES = {
    "all_reduce": (2**19, 2**23),
    "reduce": (2**21, 2**23),
    "reduce_scatter": (2**22, 2**23),
    "all_gather": (math.inf, 2**26),
    "broadcast": (math.inf, 2**26),
}

_abandoned: list[torch.Tensor] = []
"""Tensors of operations that were left in their midst: other ranks may still read and write their memory."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@functools.cache
def _how(name: str, dtype: torch.dtype, divisor: int) -> OrderedSum | None:
    """Return how torch's kernels do a reduction; None if they would not do it as MPI does."""
    if (name == "SUM" and dtype in _INTEGERS) or (name in ("SUM", "AVG") and dtype in _FLOATS):
        return OrderedSum(torch.float32 if dtype in dtypes.NARROW_FLOATS else None, divisor)
    return None


class ShmSelector:
    """The way of one group's tensors through the memory of its ranks' nodes, which is opened when first needed.

    Each operation tells whether it was done; MPI does what was not, as where a rank's tensor is on a GPU. Tensors are
    dense.
    """

    def __init__(self, comm: Intracomm, record: flight_recorder.Group, *, is_wanted: bool) -> None:
        """Prepare the way.

        Args:
            is_wanted: Whether this rank wants it; if one of the group does not, none takes it.
        """
        self._comm = comm
        self._size = comm.size
        self._record = record
        self._is_wanted = is_wanted
        self._is_open = False
        self._comms: list[Intracomm] = []  # of its own
        self._node: ShmCollectives | None = None  # if all ranks are on one node
        self._levels: HierarchicalCollectives | None = None  # if equally many are on each of several nodes

    def may_take(self, operation: str, tensor: torch.Tensor) -> bool:
        """Tell whether an operation on such a tensor, of equal size on all ranks, may go this way."""
        return self._size > 1 and self.is_worth_it(operation, tensor.nbytes)

    def is_worth_it(self, operation: str, nbytes: int) -> bool:
        """Tell whether an operation of so many bytes is faster this way."""
        return nbytes >= _LEAST_BYTES[operation][self._size > 2]

    def may_reduce(self, operation: str, tensor: torch.Tensor, reduction: Reduction) -> bool:
        """Tell whether a reduction of such tensors may go this way."""
        return self.may_take(operation, tensor) and _how(reduction.name, tensor.dtype, reduction.divisor) is not None

    # -- the operations (collective) -----------------------------------------------------------------------------

    def all_reduce(self, dense: torch.Tensor, reduction: Reduction) -> bool:
        """Reduce in place on all ranks."""
        self._open()
        flat, how = _flat(dense), _known(reduction, dense.dtype)
        if self._levels is not None:
            # The sums of nodes are MPI's to add up, which needs more width for some integers.
            how = dataclasses.replace(how, wide=reduction.wide)
            datatype = dtypes.arithmetic(how.wide or dense.dtype)
            return self._go(self._levels, flat, lambda levels: levels.reduce(flat, how, datatype))
        return self._go(self._node, flat, lambda node: node.reduce(flat, how))

    def reduce(self, dense: torch.Tensor, reduction: Reduction, root: int) -> bool:
        """Reduce in place on the root; the others' tensors keep their content."""
        self._open()
        flat, how = _flat(dense), _known(reduction, dense.dtype)
        return self._go(self._node, flat, lambda node: node.reduce(flat, how, root))

    def reduce_scatter(self, dense: torch.Tensor, result: torch.Tensor, reduction: Reduction) -> bool:
        """Reduce `dense`, a block for each rank, into each rank's own, which lies in memory of its own."""
        self._open()
        flat, how = _flat(dense), _known(reduction, dense.dtype)
        return self._go(self._node, flat, lambda node: node.reduce_scatter(flat, _flat(result), how))

    def all_gather(self, result: torch.Tensor) -> bool:
        """Fill `result`, a block for each rank, from what each rank has put in its own place."""
        self._open()
        flat = _flat(result)
        return self._go(self._node, flat, lambda node: node.all_gather(flat))

    def broadcast(self, dense: torch.Tensor, root: int) -> bool:
        """Copy the root's memory into everybody's."""
        self._open()
        flat = _flat(dense)
        return self._go(self._node, flat, lambda node: node.broadcast(flat, root))

    def _go(
        self, way: ShmCollectives | HierarchicalCollectives | None, flat: torch.Tensor, operation: Callable[[Any], None]
    ) -> bool:
        """Run an operation, if there is a way, and all ranks' tensors can go it."""
        if way is None:
            return False
        asked = array("q", [flat.is_cpu and way.can_take(flat), flat.nbytes, -flat.nbytes])
        self._comm.Allreduce(mpi.api().IN_PLACE, asked, mpi.api().MIN)
        all_can, least, most = asked[0], asked[1], -asked[2]
        if least != most:  # others would write where this tensor is not
            raise RuntimeError(
                f"the ranks' tensors are of {least} to {most} bytes.\nCall the operation with equal sizes on all ranks."
            )
        if not all_can:
            return False
        try:
            operation(way)
        except ProcessLookupError:
            self._comm.Barrier()  # as MPI would, this waits for the rank that is gone, until the watchdog ends the job
            raise
        except BaseException:  # a signal's handler may raise anything, and the others go on
            _abandoned.append(flat)
            raise
        return True

    # -- its beginning and its end -------------------------------------------------------------------------------

    def _open(self) -> None:
        """Find out who shares a node, and share memory (collective, once)."""
        if self._is_open:
            return
        self._is_open = True
        if not all(self._comm.allgather(self._is_wanted)):
            return
        node_comm = self.split_by_node(self._comm)
        self._comms.append(node_comm)
        sizes = set(self._comm.allgather(node_comm.size))
        if len(sizes) > 1 or sizes == {1}:
            return
        node, why = None, ""
        try:
            with torch.inference_mode(False):  # or it could not be used outside of that mode
                node = self.connect(node_comm)
        except segment.NoSharedMemoryError as error:
            why = str(error)
        all_can = all(self._comm.allgather(node is not None))
        if why and node_comm.rank == 0:
            warnings.warn(
                f"the {node_comm.size} ranks of this node cannot share memory: {why}. "
                f"Large tensors go by MPI alone, at about half the speed.",
                stacklevel=2,
            )
        if not all_can or node is None:
            return
        if node.size == self._size:
            self._node = node
            return
        across = cast("Intracomm", self._comm.Split(node.rank, self._comm.rank))
        self._comms.append(across)
        self._levels = HierarchicalCollectives(node, across)

    def split_by_node(self, comm: Intracomm) -> Intracomm:
        """Return the communicator of the ranks that share this rank's node (collective)."""
        return cast("Intracomm", comm.Split_type(mpi.api().COMM_TYPE_SHARED, comm.rank))

    def connect(self, node_comm: Intracomm) -> ShmCollectives:
        """Let the ranks of a node get at each other's tensors (collective over them).

        Raises:
            NoSharedMemoryError: On all of them, if there is no way.
        """
        return _connect(node_comm)

    def close(self) -> None:
        """Let go of the memory and of the communicators (collective)."""
        self._is_open = True
        self._node = self._levels = None
        while self._comms:
            self._comms.pop().Free()


def _known(reduction: Reduction, dtype: torch.dtype) -> OrderedSum:
    how = _how(reduction.name, dtype, reduction.divisor)
    assert how is not None
    return how


def _flat(dense: torch.Tensor) -> torch.Tensor:
    return dense.detach().view(-1)


def _connect(comm: Intracomm) -> ShmCollectives:
    """Return the collectives of ranks on one node: by cross-memory attach, or else a shared segment (collective).

    Raises:
        NoSharedMemoryError: On all ranks, if neither works.
    """
    if cma.is_available(comm):
        return cma.CMACollectives(comm)
    return segment.SegmentCollectives(comm, segment.make(comm, segment.segment_bytes(comm.size)))
