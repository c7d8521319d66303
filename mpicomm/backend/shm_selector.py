"""Selects the algorithm of each collective, and sets up the shared memory of the ranks on one node.

The selection depends on values that are equal on all ranks: operation, size, dtype and reduction.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, cast

import torch

from mpicomm import agreement, mpi
from mpicomm.backend import algorithms
from mpicomm.backend.algorithms import Algorithm
from mpicomm.backend.group_state import check_unbroken
from mpicomm.backend.hierarchical import HierarchicalAllReduce
from mpicomm.backend.reductions import Reduction
from mpicomm.settings import Settings
from mpicomm.shm import native, segment
from mpicomm.shm.slots import NativeSlots, segment_bytes
from mpicomm.watchdog import flight_recorder

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class ShmSelector:
    """Selects the algorithms of one group's collectives, and owns the slots for those that use shared memory.

    Shared memory is opened at its first use. An operation through slots returns whether it ran. If it did not, for
    example because a rank's tensor is on a GPU, the caller uses MPI.
    """

    def __init__(self, comm: Intracomm, record: flight_recorder.Group, settings: Settings) -> None:
        """Prepare the path without communication.

        Args:
            settings: Of this rank; the group uses shared memory only if all ranks enable it and have the C library.
        """
        self._comm = comm
        self._record = record
        self._is_wanted = settings.shared_memory and settings.native
        self._comms: list[Intracomm] = []  # created here, freed by close()
        self._slots: NativeSlots | None = None  # if all ranks are on one node
        self._hierarchical: HierarchicalAllReduce | None = None  # if several nodes have equally many ranks each
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
    def slots(self) -> NativeSlots:
        """The slots that `Algorithm.SLOTS` means."""
        assert self._slots is not None
        return self._slots

    @property
    def hierarchical(self) -> HierarchicalAllReduce:
        """The all-reduce that `Algorithm.HIERARCHICAL` means."""
        assert self._hierarchical is not None
        return self._hierarchical

    def _open(self) -> None:
        """Find the ranks of each node and share their memory (collective, once)."""
        self._choices.clear()
        # 1. check that all ranks enable it, and have the C library
        if not agreement.all_true(self._comm, self._is_wanted and native.library() is not None):
            return
        # 2. split the group by node; all nodes must have the same number of ranks, and more than one
        node_comm = mpi.tracked(self.split_by_node(self._comm))
        self._comms.append(node_comm)
        sizes = set(self._comm.allgather(node_comm.size))
        if len(sizes) > 1 or sizes == {1}:
            return
        # 3. share memory within each node; all nodes must succeed
        slots = self._connect(node_comm)
        if not agreement.all_true(self._comm, slots is not None) or slots is None:
            return
        if node_comm.size == self._comm.size:
            self._slots = slots
            self._choices.replace(Algorithm.SLOTS, algorithms.SLOTS)
            return
        # 4. on several nodes, connect the ranks that have the same rank on their nodes
        across = mpi.tracked(cast("Intracomm", self._comm.Split(node_comm.rank, self._comm.rank)))
        self._comms.append(across)
        self._hierarchical = HierarchicalAllReduce(self._comm, slots, across)
        self._choices.replace(Algorithm.HIERARCHICAL, algorithms.HIERARCHICAL)

    def split_by_node(self, comm: Intracomm) -> Intracomm:
        """Return the communicator of the ranks that share this rank's node (collective)."""
        return cast("Intracomm", comm.Split_type(mpi.api().COMM_TYPE_SHARED, comm.rank))

    def _connect(self, node_comm: Intracomm) -> NativeSlots | None:
        """Return slots of the ranks of a node, or None, with a warning, if they cannot share memory (collective)."""
        try:
            with torch.inference_mode(False):  # otherwise the memory could not be used outside of inference mode
                memory = segment.make(node_comm, segment_bytes(node_comm.size))
        except segment.NoSharedMemoryError as error:
            if node_comm.rank == 0:
                warnings.warn(
                    f"the {node_comm.size} ranks of this node cannot share memory: {error}. "
                    f"Large tensors use MPI alone, which is slower. "
                    f"Set MPICOMM_SHARED_MEMORY=0 to disable shared memory and this warning.",
                    stacklevel=2,
                )
            return None
        return NativeSlots(node_comm, memory, self._advance)

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
        self._slots = self._hierarchical = None
        while self._comms:
            mpi.free(self._comms.pop())
