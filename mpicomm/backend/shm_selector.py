"""Selects the shared-memory path for large tensors of ranks on one node, and sets it up.

A tensor takes this path if it is large enough and torch's kernels can compute its operation. Both conditions are equal
on all ranks, and constant: the bits of a program's results must not depend on how fast the machine was at startup.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from mpicomm import agreement, mpi
from mpicomm.backend import dtypes
from mpicomm.backend.reductions import Reduction
from mpicomm.shm import cma, segment
from mpicomm.shm.hierarchical import HierarchicalCollectives
from mpicomm.shm.interface import OrderedSum, ShmCollectives
from mpicomm.watchdog import flight_recorder

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# Smallest size in bytes at which shared memory is faster than MPI, for two ranks and for more (docs/performance.md).
# Between two ranks, MPI's own copy is as direct.
_LEAST_BYTES = {
    "all_reduce": (2**19, 2**23),
    "reduce": (2**21, 2**23),
    "reduce_scatter": (2**22, 2**23),
    "all_gather": (math.inf, 2**26),
    "broadcast": (math.inf, 2**26),
}

_abandoned: list[torch.Tensor] = []
"""Tensors of interrupted operations: other ranks may still read and write their memory."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@functools.cache
def _how(name: str, dtype: torch.dtype, divisor: int) -> OrderedSum | None:
    """Return how torch's kernels compute a reduction; None if they do not compute it as MPI does."""
    if (name == "SUM" and dtype in _INTEGERS) or (name in ("SUM", "AVG") and dtype in _FLOATS):
        return OrderedSum(torch.float32 if dtype in dtypes.NARROW_FLOATS else None, divisor)
    return None


class ShmSelector:
    """The shared-memory path of one group's tensors, opened at its first use.

    Each operation returns whether it ran. If it did not, for example because a rank's tensor is on a GPU, the caller
    uses MPI. Tensors are dense.
    """

    least_bytes = min(least for of_size in _LEAST_BYTES.values() for least in of_size)
    """Below this, no operation uses shared memory."""

    def __init__(self, comm: Intracomm, record: flight_recorder.Group, *, is_wanted: bool) -> None:
        """Prepare the path without communication.

        Args:
            is_wanted: Whether this rank's settings enable it; the group uses it only if all ranks enable it.
        """
        self._comm = comm
        self._size = comm.size
        self._record = record
        self._is_wanted = is_wanted
        self._is_open = False
        self._comms: list[Intracomm] = []  # created here, freed by close()
        self._node: ShmCollectives | None = None  # if all ranks are on one node
        self._hierarchical: HierarchicalCollectives | None = None  # if several nodes have equally many ranks each

    def may_take(self, operation: str, tensor: torch.Tensor) -> bool:
        """Return whether an operation on such a tensor, of equal size on all ranks, may use shared memory."""
        return self._size > 1 and self.is_worth_it(operation, tensor.nbytes)

    def is_worth_it(self, operation: str, nbytes: int) -> bool:
        """Return whether an operation on `nbytes` bytes is faster through shared memory."""
        return nbytes >= _LEAST_BYTES[operation][self._size > 2]

    def may_reduce(self, operation: str, tensor: torch.Tensor, reduction: Reduction) -> bool:
        """Return whether a reduction of such tensors may use shared memory."""
        return self.may_take(operation, tensor) and _how(reduction.name, tensor.dtype, reduction.divisor) is not None

    # -- the operations (collective) -----------------------------------------------------------------------------

    def all_reduce(self, dense: torch.Tensor, reduction: Reduction) -> bool:
        """All-reduce in place."""
        self._open()
        flat, how = _flat(dense), _known(reduction, dense.dtype)
        if self._hierarchical is not None:
            # MPI adds the sums of the nodes, for which some integers need a wider dtype.
            how = dataclasses.replace(how, wide=reduction.wide)
            datatype = dtypes.arithmetic(how.wide or dense.dtype)
            return self._go(self._hierarchical, flat, lambda levels: levels.reduce(flat, how, datatype))
        return self._go(self._node, flat, lambda node: node.reduce(flat, how))

    def reduce(self, dense: torch.Tensor, reduction: Reduction, root: int) -> bool:
        """Reduce in place on the root; the tensors of other ranks keep their content."""
        self._open()
        flat, how = _flat(dense), _known(reduction, dense.dtype)
        return self._go(self._node, flat, lambda node: node.reduce(flat, how, root))

    def reduce_scatter(self, dense: torch.Tensor, result: torch.Tensor, reduction: Reduction) -> bool:
        """Reduce `dense`, with a block for each rank; `result`, in separate memory, receives this rank's block."""
        self._open()
        flat, how = _flat(dense), _known(reduction, dense.dtype)
        return self._go(self._node, flat, lambda node: node.reduce_scatter(flat, _flat(result), how))

    def all_gather(self, result: torch.Tensor) -> bool:
        """Gather into `result`, with a block for each rank; this rank's block is already in its place."""
        self._open()
        flat = _flat(result)
        return self._go(self._node, flat, lambda node: node.all_gather(flat))

    def broadcast(self, dense: torch.Tensor, root: int) -> bool:
        """Copy the root's memory to all ranks."""
        self._open()
        flat = _flat(dense)
        return self._go(self._node, flat, lambda node: node.broadcast(flat, root))

    def _go(
        self, way: ShmCollectives | HierarchicalCollectives | None, flat: torch.Tensor, operation: Callable[[Any], None]
    ) -> bool:
        """Run an operation if the path exists and all ranks' tensors can use it."""
        if way is None:
            return False
        # 1. compare the tensors of all ranks, and run the operation if they fit
        try:
            found = way.compare(flat)  # from here on, other ranks know the address of this tensor
            are_equal = found.least_bytes == found.most_bytes
            if are_equal and found.all_can:
                operation(way)
        except ProcessLookupError:
            self._comm.Barrier()  # like MPI, wait for the terminated rank until the watchdog aborts the job
            raise
        except BaseException:  # a signal handler may raise anything, and the other ranks continue
            _abandoned.append(flat)
            raise
        # 2. refuse tensors of different sizes, for which other ranks would access memory beyond this tensor
        if not are_equal:
            raise RuntimeError(
                f"tensor sizes must be equal on all ranks, got {found.least_bytes} to {found.most_bytes} bytes.\n"
                f"Pass tensors of the same size on every rank."
            )
        return found.all_can

    # -- setup and teardown --------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Find the ranks of each node and share their memory (collective, once)."""
        if self._is_open:
            return
        self._is_open = True
        # 1. check that all ranks enable it
        if not agreement.all_true(self._comm, self._is_wanted):
            return
        # 2. split the group by node; all nodes must have the same number of ranks, and more than one
        node_comm = self.split_by_node(self._comm)
        self._comms.append(node_comm)
        sizes = set(self._comm.allgather(node_comm.size))
        if len(sizes) > 1 or sizes == {1}:
            return
        # 3. share memory within each node; all nodes must succeed
        node, why = None, ""
        try:
            with torch.inference_mode(False):  # otherwise its tensors could not be used outside of inference mode
                node = self.connect(node_comm)
        except segment.NoSharedMemoryError as error:
            why = str(error)
        all_can = agreement.all_true(self._comm, node is not None)
        if why and node_comm.rank == 0:
            warnings.warn(
                f"the {node_comm.size} ranks of this node cannot share memory: {why}. "
                f"Large tensors use MPI alone, which is slower. "
                f"Set MPICOMM_SHARED_MEMORY=0 to disable shared memory and this warning.",
                stacklevel=2,
            )
        if not all_can or node is None:
            return
        # 4. on several nodes, connect the ranks that have the same rank on their nodes
        if node.size == self._size:
            self._node = node
            return
        across = cast("Intracomm", self._comm.Split(node.rank, self._comm.rank))
        self._comms.append(across)
        self._hierarchical = HierarchicalCollectives(self._comm, node, across)

    def split_by_node(self, comm: Intracomm) -> Intracomm:
        """Return the communicator of the ranks that share this rank's node (collective)."""
        return cast("Intracomm", comm.Split_type(mpi.api().COMM_TYPE_SHARED, comm.rank))

    def connect(self, node_comm: Intracomm) -> ShmCollectives:
        """Give the ranks of a node access to each other's tensors (collective over these ranks).

        Raises:
            NoSharedMemoryError: On all of these ranks, if no method works.
        """
        return _connect(node_comm)

    def close(self) -> None:
        """Release the memory and the communicators (collective)."""
        self._is_open = True
        self._node = self._hierarchical = None
        while self._comms:
            self._comms.pop().Free()


def _known(reduction: Reduction, dtype: torch.dtype) -> OrderedSum:
    how = _how(reduction.name, dtype, reduction.divisor)
    assert how is not None
    return how


def _flat(dense: torch.Tensor) -> torch.Tensor:
    return dense.detach().view(-1)


def _connect(comm: Intracomm) -> ShmCollectives:
    """Return the collectives of one node's ranks: by cross-memory attach (CMA), else a shared segment (collective).

    Raises:
        NoSharedMemoryError: On all ranks, if neither works.
    """
    if cma.is_available(comm):
        return cma.CMACollectives(comm)
    return segment.SegmentCollectives(comm, segment.make(comm, segment.segment_bytes(comm.size)))
