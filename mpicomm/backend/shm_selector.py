"""Selects the algorithm of each collective, and sets up the shared memory of the ranks on one node.

The selection depends on values that are equal on all ranks: operation, size, dtype and reduction.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from mpicomm import agreement, mpi
from mpicomm.backend import algorithms, dtypes
from mpicomm.backend.algorithms import Algorithm
from mpicomm.backend.group_state import check_unbroken
from mpicomm.backend.reductions import Reduction
from mpicomm.settings import Settings
from mpicomm.shm import cma, native, segment
from mpicomm.shm.hierarchical import HierarchicalCollectives
from mpicomm.shm.interface import OrderedSum, ShmCollectives, different
from mpicomm.shm.slots import NativeSlots, TorchSlots
from mpicomm.shm.slots import segment_bytes as bytes_for_slots
from mpicomm.watchdog import flight_recorder

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_MOST_BYTES = 2**31 - 1  # of one MPI call between nodes

_abandoned: list[torch.Tensor] = []
"""Tensors of interrupted operations: other ranks may still read and write their memory."""


def release_abandoned() -> None:
    """Release the tensors of interrupted operations, once no rank is in an operation of that time any more."""
    _abandoned.clear()


class ShmSelector:
    """Selects the algorithms of one group's collectives, and runs those that use shared memory.

    Shared memory is opened at its first use. Each operation takes the algorithm that `select` has returned, and returns
    whether it ran. If it did not, for example because a rank's tensor is on a GPU, the caller uses MPI. Tensors are
    dense.
    """

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
        self._comms: list[Intracomm] = []  # created here, freed by close()
        self._slots: NativeSlots | TorchSlots | None = None  # if all ranks are on one node
        self._node: ShmCollectives | None = None  # if all ranks are on one node, for tensors that slots do not take
        self._hierarchical: HierarchicalCollectives | None = None  # if several nodes have equally many ranks each
        self._choices = algorithms.Choices(comm.size)

    def select(self, operation: str, nbytes: int, reduction: Reduction | None = None) -> Algorithm:
        """Return the algorithm of an operation (collective at the first use of shared memory).

        Args:
            nbytes: Size of the larger of a rank's tensors, equal on all ranks; 0 if not all ranks know it.
            reduction: Of a reduction, how it is computed.
        """
        row = operation if reduction is None else reduction.rows.get(operation)
        algorithm = self._choices.select(row, nbytes)
        if algorithm is Algorithm.UNKNOWN:
            self._open()
            algorithm = self._choices.select(row, nbytes)
        return algorithm

    @property
    def native_slots(self) -> NativeSlots:
        """The slots that `Algorithm.SLOTS` means for all operations but reductions."""
        assert isinstance(self._slots, NativeSlots)
        return self._slots

    # -- the operations (collective) -----------------------------------------------------------------------------

    def all_reduce(self, algorithm: Algorithm, dense: torch.Tensor, reduction: Reduction) -> bool:
        """All-reduce in place."""
        how = _ordered(reduction)
        if self._slots is not None and algorithm is Algorithm.SLOTS:
            return self._slots.reduce(dense, how)
        flat, call = _flat(dense), native.reducing(native.ALL_REDUCE, dense.dtype, divisor=how.divisor)
        if algorithm is Algorithm.PEER_MEMORY:
            return self._go(self._node, flat, call, lambda node: node.reduce(flat, how))
        how, datatype = _between_nodes(how, reduction, dense.dtype)
        return self._go(self._hierarchical, flat, call, lambda levels: levels.all_reduce(flat, how, datatype))

    def reduce(self, algorithm: Algorithm, dense: torch.Tensor, reduction: Reduction, root: int) -> bool:
        """Reduce in place on the root; the tensors of other ranks keep their content."""
        how = _ordered(reduction)
        if self._slots is not None and algorithm is Algorithm.SLOTS:
            return self._slots.reduce(dense, how, root)
        flat, call = _flat(dense), native.reducing(native.REDUCE, dense.dtype, root, how.divisor)
        return self._go(self._node, flat, call, lambda node: node.reduce(flat, how, root))

    def reduce_scatter(
        self, algorithm: Algorithm, dense: torch.Tensor, result: torch.Tensor, reduction: Reduction
    ) -> bool:
        """Reduce `dense`, with a block for each rank; `result` receives this rank's block.

        Args:
            result: Separate memory; with slots, it may also be this rank's block of `dense`.
        """
        how = _ordered(reduction)
        if self._slots is not None and algorithm is Algorithm.SLOTS:
            return self._slots.reduce_scatter(dense, result, how)
        flat, call = _flat(dense), native.reducing(native.REDUCE_SCATTER, dense.dtype, divisor=how.divisor)
        if algorithm is Algorithm.PEER_MEMORY:
            return self._go(self._node, flat, call, lambda node: node.reduce_scatter(flat, _flat(result), how))
        how, datatype = _between_nodes(how, reduction, dense.dtype)
        return self._go(
            self._hierarchical, flat, call, lambda levels: levels.reduce_scatter(flat, _flat(result), how, datatype)
        )

    def all_gather(self, result: torch.Tensor) -> bool:
        """Gather into `result`, with a block for each rank, of which this rank's is already in its place."""
        flat, call = _flat(result), native.moving(native.ALL_GATHER, result.dtype)
        return self._go(self._node or self._hierarchical, flat, call, lambda way: way.all_gather(flat))

    def broadcast(self, dense: torch.Tensor, root: int) -> bool:
        """Copy the root's memory to all ranks."""
        flat, call = _flat(dense), native.moving(native.BROADCAST, dense.dtype, root)
        return self._go(self._node or self._hierarchical, flat, call, lambda way: way.broadcast(flat, root))

    def _go(
        self,
        way: ShmCollectives | HierarchicalCollectives | None,
        flat: torch.Tensor,
        call: int,
        operation: Callable[[Any], None],
    ) -> bool:
        """Run an operation if the path exists and all ranks' tensors can use it."""
        if way is None:
            return False
        # 1. compare the tensors of all ranks, and run the operation if they fit
        try:
            found = way.compare(flat, call)  # from here on, other ranks know the address of this tensor
            if found.are_equal and found.all_can:
                operation(way)
        except ProcessLookupError:
            self._comm.Barrier()  # like MPI, wait for the terminated rank until the watchdog aborts the job
            raise
        except BaseException:  # a signal handler may raise anything, and the other ranks continue
            _abandoned.append(flat)
            raise
        # 2. refuse different calls: with tensors of other sizes, other ranks would access memory beyond this tensor
        if not found.are_equal:
            raise different(found.least_bytes, found.most_bytes)
        return found.all_can

    # -- setup and teardown --------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Find the ranks of each node and share their memory (collective, once)."""
        self._choices.clear()
        # 1. check that all ranks enable it
        if not agreement.all_true(self._comm, self._is_wanted):
            return
        # 2. split the group by node; all nodes must have the same number of ranks, and more than one
        node_comm = mpi.tracked(self.split_by_node(self._comm))
        self._comms.append(node_comm)
        sizes = set(self._comm.allgather(node_comm.size))
        if len(sizes) > 1 or sizes == {1}:
            return
        # 3. on one node, share memory for slots
        if node_comm.size == self._size:
            self._slots = self.connect_slots(node_comm)
            if isinstance(self._slots, NativeSlots):
                self._choices.add(Algorithm.SLOTS, algorithms.NATIVE_SLOTS)
                return
            if self._slots is not None:
                self._choices.add(Algorithm.SLOTS, algorithms.TORCH_SLOTS, self._slots.most_bytes)
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
            self._choices.add(Algorithm.PEER_MEMORY, algorithms.PEER_MEMORY)
            return
        first = node_comm.bcast(self._comm.rank, 0)
        across = mpi.tracked(cast("Intracomm", self._comm.Split(node.rank, first)))
        self._comms.append(across)
        self._hierarchical = HierarchicalCollectives(self._comm, node, across)
        self._choices.add(Algorithm.HIERARCHICAL, algorithms.ACROSS_NODES)
        if self._hierarchical.is_by_node:
            self._choices.add(Algorithm.HIERARCHICAL, algorithms.ACROSS_NODES_IN_ORDER, _MOST_BYTES)

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
        can_use = self._uses_native and native.library() is not None
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
        self._choices.clear()
        self._slots = self._node = self._hierarchical = None
        while self._comms:
            mpi.free(self._comms.pop())


def _ordered(reduction: Reduction) -> OrderedSum:
    assert reduction.ordered is not None
    return reduction.ordered


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
