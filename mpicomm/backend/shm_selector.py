"""Selects the shared-memory path for the tensors of ranks on one node, and sets it up.

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
from mpicomm.backend.group_state import check_unbroken
from mpicomm.backend.reductions import Reduction
from mpicomm.settings import Settings
from mpicomm.shm import cma, native, segment
from mpicomm.shm.hierarchical import HierarchicalCollectives
from mpicomm.shm.interface import OrderedSum, ShmCollectives
from mpicomm.shm.slots import NativeSlots, TorchSlots
from mpicomm.shm.slots import segment_bytes as bytes_for_slots
from mpicomm.watchdog import flight_recorder

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# Smallest size in bytes from which shared memory is used, for two ranks and for more (docs/performance.md).
_Least = dict[str, tuple[float, float]]
_SMALLEST: _Least = dict.fromkeys(("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast"), (2**12, 2**12))
"""With the C library: slots are faster than MPI from here on."""

_LEAST_WITHOUT_LIBRARY: _Least = {
    # Two ranks have the same sums from MPI, which is faster below. More ranks have the sums of the C library only if
    # they add in its order.
    "all_reduce": (2**17, 2**12),
    "reduce": (2**17, 2**12),
    "reduce_scatter": (2**18, 2**12),
    "all_gather": (math.inf, 2**26),
    "broadcast": (math.inf, 2**26),
}
_LEAST_ACROSS_NODES: _Least = {
    "all_reduce": (2**19, 2**23),
    "reduce": (math.inf, math.inf),
    "reduce_scatter": (math.inf, 2**23),
    "all_gather": (math.inf, 2**23),
    "broadcast": (math.inf, 2**23),
}
_LEAST_WITHOUT_SLOTS: _Least = {
    # If there is no memory for slots. Between two ranks, MPI's own copy is as direct.
    "all_reduce": (2**19, 2**23),
    "reduce": (2**21, 2**23),
    "reduce_scatter": (2**19, 2**23),
    "all_gather": (math.inf, 2**26),
    "broadcast": (math.inf, 2**26),
}

_MOST_BYTES = 2**31 - 1  # of one MPI call between nodes

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

    least_bytes = min(least for of_size in _SMALLEST.values() for least in of_size)
    """Below this, no operation uses shared memory."""

    def __init__(self, comm: Intracomm, record: flight_recorder.Group, settings: Settings) -> None:
        """Prepare the path without communication.

        Args:
            settings: Of this rank; the group uses the path, and the C library, only if all ranks enable it.
        """
        self._comm = comm
        self._size = comm.size
        self._record = record
        self._is_wanted = settings.shares_memory
        self._uses_native = settings.uses_native
        self._is_open = False
        self._least = _SMALLEST  # selected by `_open`
        self._comms: list[Intracomm] = []  # created here, freed by close()
        self._slots: NativeSlots | TorchSlots | None = None  # if all ranks are on one node
        self._node: ShmCollectives | None = None  # if all ranks are on one node, for tensors that slots do not take
        self._hierarchical: HierarchicalCollectives | None = None  # if several nodes have equally many ranks each

    def may_take(self, operation: str, tensor: torch.Tensor) -> bool:
        """Return whether an operation on such a tensor, of equal size on all ranks, may use shared memory."""
        return self._size > 1 and self.is_worth_it(operation, tensor.nbytes)

    def is_worth_it(self, operation: str, nbytes: int) -> bool:
        """Return whether an operation on `nbytes` bytes uses shared memory."""
        return nbytes >= self._least[operation][self._size > 2]

    def may_reduce(self, operation: str, tensor: torch.Tensor, reduction: Reduction) -> bool:
        """Return whether a reduction of such tensors may use shared memory."""
        return self.may_take(operation, tensor) and _how(reduction.name, tensor.dtype, reduction.divisor) is not None

    # -- the operations (collective) -----------------------------------------------------------------------------

    def all_reduce(self, dense: torch.Tensor, reduction: Reduction) -> bool:
        """All-reduce in place."""
        if not self._opens("all_reduce", dense):
            return False
        how = _known(reduction, dense.dtype)
        if self._slots is not None and dense.nbytes <= self._slots.most_bytes:
            return self._slots.reduce(dense, how)
        flat = _flat(dense)
        if self._hierarchical is not None:
            how, datatype = _between_nodes(how, reduction, dense.dtype)
            return self._go(self._hierarchical, flat, lambda levels: levels.all_reduce(flat, how, datatype))
        return self._go(self._node, flat, lambda node: node.reduce(flat, how))

    def reduce(self, dense: torch.Tensor, reduction: Reduction, root: int) -> bool:
        """Reduce in place on the root; the tensors of other ranks keep their content."""
        if not self._opens("reduce", dense):
            return False
        how = _known(reduction, dense.dtype)
        if self._slots is not None and dense.nbytes <= self._slots.most_bytes:
            return self._slots.reduce(dense, how, root)
        flat = _flat(dense)
        return self._go(self._node, flat, lambda node: node.reduce(flat, how, root))

    def reduce_scatter(self, dense: torch.Tensor, result: torch.Tensor, reduction: Reduction) -> bool:
        """Reduce `dense`, with a block for each rank; `result`, in separate memory, receives this rank's block."""
        if not self._opens("reduce_scatter", dense):
            return False
        how = _known(reduction, dense.dtype)
        if self._slots is not None and dense.nbytes <= self._slots.most_bytes:
            return self._slots.reduce_scatter(dense, result, how)
        flat = _flat(dense)
        if self._hierarchical is not None:
            how, datatype = _between_nodes(how, reduction, dense.dtype)
            return self._go(
                self._by_node(flat), flat, lambda levels: levels.reduce_scatter(flat, _flat(result), how, datatype)
            )
        return self._go(self._node, flat, lambda node: node.reduce_scatter(flat, _flat(result), how))

    def all_gather(self, result: torch.Tensor, source: torch.Tensor | None = None) -> bool:
        """Gather into `result`, with a block for each rank.

        Args:
            source: This rank's block, in memory that does not overlap the other blocks of `result`; None if it is
                already in its place.
        """
        if not self._opens("all_gather", result):
            return False
        if isinstance(self._slots, NativeSlots):
            return self._slots.all_gather(result, source)
        flat = _flat(result)
        if source is not None:
            flat.chunk(self._size)[self._comm.rank].copy_(_flat(source))
        return self._go(self._node or self._by_node(flat), flat, lambda way: way.all_gather(flat))

    def broadcast(self, dense: torch.Tensor, root: int) -> bool:
        """Copy the root's memory to all ranks."""
        if not self._opens("broadcast", dense):
            return False
        if isinstance(self._slots, NativeSlots):
            return self._slots.broadcast(dense, root)
        flat = _flat(dense)
        return self._go(self._node or self._by_node(flat), flat, lambda way: way.broadcast(flat, root))

    def _by_node(self, flat: torch.Tensor) -> HierarchicalCollectives | None:
        """Return the hierarchical operations if they support the order of the ranks, and one MPI call so many bytes."""
        levels = self._hierarchical
        return levels if levels is not None and levels.is_by_node and flat.nbytes <= _MOST_BYTES else None

    def _opens(self, operation: str, tensor: torch.Tensor) -> bool:
        """Open the path at its first use (collective); return whether this operation uses it."""
        if not self._is_open:
            self._open()
        return self.is_worth_it(operation, tensor.nbytes)

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
        self._is_open = True
        self._least = _LEAST_WITHOUT_SLOTS
        # 1. check that all ranks enable it
        if not agreement.all_true(self._comm, self._is_wanted):
            return
        # 2. split the group by node; all nodes must have the same number of ranks, and more than one
        node_comm = self.split_by_node(self._comm)
        self._comms.append(node_comm)
        sizes = set(self._comm.allgather(node_comm.size))
        if len(sizes) > 1 or sizes == {1}:
            return
        # 3. on one node, share memory for slots
        if node_comm.size == self._size:
            self._slots = self.connect_slots(node_comm)
            if isinstance(self._slots, NativeSlots):
                self._least = _SMALLEST
                return
            if self._slots is not None:
                self._least = _LEAST_WITHOUT_LIBRARY
        # 4. share the tensors' memory within each node; all nodes must succeed
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
        # 5. on several nodes, connect the ranks that have the same rank on their nodes
        if node.size == self._size:
            self._node = node
            return
        first = node_comm.bcast(self._comm.rank, 0)
        across = cast("Intracomm", self._comm.Split(node.rank, first))
        self._comms.append(across)
        self._least = _LEAST_ACROSS_NODES
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

    def connect_slots(self, node_comm: Intracomm) -> NativeSlots | TorchSlots | None:
        """Give the ranks of a node slots in shared memory; return None if they cannot share it (collective)."""
        can_use = self._uses_native and native.library() is not None and node_comm.size <= native.MAX_RANKS
        uses_native = agreement.all_true(node_comm, can_use)
        try:
            with torch.inference_mode(False):
                memory = segment.make(node_comm, bytes_for_slots(node_comm.size))
        except segment.NoSharedMemoryError:
            return None
        return NativeSlots(node_comm, memory, self._advance) if uses_native else TorchSlots(node_comm, memory)

    def _advance(self) -> None:
        """Let MPI progress while this rank waits for others, which may wait for a message of this rank.

        Raises:
            MpicommError: If the group was aborted, or has failed on another rank.
        """
        self._comms[0].Iprobe()  # of the node, which has no messages: Open MPI makes no progress if it finds one
        check_unbroken(self._record)

    def close(self) -> None:
        """Release the memory and the communicators (collective)."""
        self._is_open = True
        self._slots = self._node = self._hierarchical = None
        while self._comms:
            self._comms.pop().Free()


def _known(reduction: Reduction, dtype: torch.dtype) -> OrderedSum:
    how = _how(reduction.name, dtype, reduction.divisor)
    assert how is not None
    return how


def _between_nodes(how: OrderedSum, reduction: Reduction, dtype: torch.dtype) -> tuple[OrderedSum, Any]:
    """Return how nodes add, and the MPI datatype of their sums: MPI needs a wider dtype for some integers."""
    how = dataclasses.replace(how, wide=reduction.wide)
    return how, dtypes.arithmetic(how.wide or dtype)


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
