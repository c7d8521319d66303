"""The algorithms of collectives: the sizes from which each is used, and their selection for a group.

The sizes were measured (benchmarks/README.md) and are constant: the bits of a program's results must not depend on how
fast the machine was at startup. The selection depends on values that are equal on all ranks: operation, size, dtype and
reduction. Shared memory is opened at its first use.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from mpicomm import agreement, mpi
from mpicomm.backend.execution.group_state import check_unbroken
from mpicomm.backend.transfer.hierarchical import HierarchicalAllReduce
from mpicomm.backend.transfer.reductions import Reduction
from mpicomm.backend.transfer.slots import NativeSlots, NoSharedMemoryError, memory_bytes, share_memory
from mpicomm.native import c_library
from mpicomm.recorder import flight_recorder
from mpicomm.settings import Settings

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SmallestSizes = Mapping[str, int]
"""The smallest size in bytes from which an algorithm is used; no row: never."""


class Algorithm(enum.Enum):
    """How a collective is computed."""

    MPI = "by MPI"
    SLOTS = "through slots in shared memory"
    HIERARCHICAL = "through shared memory within nodes, by MPI between nodes"
    UNKNOWN = "not known before the ranks have tried to share memory"


_KIB, _MIB = 2**10, 2**20
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")

_CONVERTED_REDUCTIONS = {operation: f"{operation}, converted" for operation in _REDUCTIONS}
"""The rows of reductions for which MPI needs conversions before and after the call."""

_OPERATIONS = (*_REDUCTIONS, "all_gather", "broadcast", "all_to_all", "gather", "scatter")  # in the order of slots.h

SLOT_OPERATIONS: SmallestSizes = dict.fromkeys((*_OPERATIONS, *_CONVERTED_REDUCTIONS.values()), 0)
"""If all ranks are on one node."""

HIERARCHICAL_OPERATIONS: SmallestSizes = {"all_reduce": 8 * _MIB, _CONVERTED_REDUCTIONS["all_reduce"]: 8 * _MIB}
"""On several nodes, with several ranks on each."""

_NEVER = (math.inf, Algorithm.MPI)
_LARGEST_SIZE = 2**64 - 1


class Choices:
    """The algorithms of one group, and the sizes from which it uses each."""

    def __init__(self, size: int) -> None:
        """Select `UNKNOWN` from the smallest size of each row on; if the group has one rank, always MPI."""
        self._by_row: dict[str, tuple[float, Algorithm]] = {}
        if size > 1:
            self.replace(Algorithm.UNKNOWN, SLOT_OPERATIONS)

    def clear(self) -> None:
        """Select MPI for all sizes."""
        self._by_row.clear()

    def replace(self, algorithm: Algorithm, table: SmallestSizes) -> None:
        """Select an algorithm from the sizes of a table on, and MPI for all others."""
        self._by_row = {row: (least, algorithm) for row, least in table.items()}

    def smallest_sizes(self, operation: str) -> tuple[int, int]:
        """Return the sizes from which an operation, and its converted form, do not use MPI alone."""
        rows = (operation, _CONVERTED_REDUCTIONS.get(operation, operation))
        native, converted = [int(min(self._by_row.get(row, _NEVER)[0], _LARGEST_SIZE)) for row in rows]
        return native, converted

    def select(self, row: str, nbytes: int) -> Algorithm:
        """Return the algorithm of an operation.

        Args:
            row: The row of the operation in the tables.
            nbytes: Size of the larger of a rank's tensors, equal on all ranks.
        """
        least, algorithm = self._by_row.get(row, _NEVER)
        return algorithm if nbytes >= least else Algorithm.MPI


class AlgorithmSelector:
    """Selects the algorithms of one group's collectives, and owns the slots for those that use shared memory.

    Shared memory is opened at its first use. An operation through slots returns whether it ran. If it did not, for
    example because a rank's tensor is on a GPU, the caller uses MPI.
    """

    def __init__(self, comm: Intracomm, record: flight_recorder.Group, settings: Settings) -> None:
        """Select nothing yet; does not communicate.

        Args:
            settings: Of this rank; the group uses shared memory only if all ranks enable it and have the C library.
        """
        self._comm = comm
        self._record = record
        self._is_wanted = settings.shared_memory and settings.native
        self._comms: list[Intracomm] = []  # created here, freed by close()
        self.slots: NativeSlots | None = None
        """Set, by the first selection that opens shared memory, if all ranks are on one node."""

        self.hierarchical: HierarchicalAllReduce | None = None
        """Set at the same time if several nodes have equally many ranks each."""

        self._choices = Choices(comm.size)
        self.plain: Any = None
        """The plain calls of the extension module, if the group has them."""

    def publish_to(self, plain: Any) -> None:
        """Let the plain calls of the extension module select the same algorithms."""
        self.plain = plain
        self._publish()

    def _publish(self) -> None:
        if self.plain is None:
            return
        rows = [self._choices.smallest_sizes(operation) for operation in _OPERATIONS]
        if self.slots is not None:
            self.plain.use_slots(rows, *self.slots.parts_of_plain_calls())
        else:
            self.plain.use(rows)

    def select(self, operation: str, nbytes: int, reduction: Reduction | None = None) -> Algorithm:
        """Return the algorithm of an operation (collective at the first use of shared memory).

        Args:
            nbytes: Size of the larger of a rank's tensors, equal on all ranks; 0 if not all ranks know it.
            reduction: Of a reduction, how it is computed.
        """
        row = operation
        if reduction is not None:
            if not reduction.uses_slots:
                return Algorithm.MPI
            if not reduction.is_native:
                row = _CONVERTED_REDUCTIONS[operation]
        algorithm = self._choices.select(row, nbytes)
        if algorithm is Algorithm.UNKNOWN:
            self._open()
            self._publish()
            algorithm = self._choices.select(row, nbytes)
        if algorithm is Algorithm.HIERARCHICAL and reduction is not None and reduction.extreme:
            return Algorithm.MPI  # between nodes, MPI adds
        return algorithm

    def _open(self) -> None:
        """Find the ranks of each node and share their memory (collective, once)."""
        self._choices.clear()
        # 1. check that all ranks enable it, and have the C library
        if not agreement.all_true(self._comm, self._is_wanted and c_library.load() is not None):
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
            self.slots = slots
            self._choices.replace(Algorithm.SLOTS, SLOT_OPERATIONS)
            return
        # 4. on several nodes, connect the ranks that have the same rank on their nodes; MPI then adds the nodes in one
        #    order in all blocks, so that equal numbers have equal sums wherever they are in the tensor
        first = node_comm.bcast(self._comm.rank)
        across = mpi.tracked(cast("Intracomm", self._comm.Split(node_comm.rank, first)))
        self._comms.append(across)
        self.hierarchical = HierarchicalAllReduce(self._comm, slots, across)
        self._choices.replace(Algorithm.HIERARCHICAL, HIERARCHICAL_OPERATIONS)

    def split_by_node(self, comm: Intracomm) -> Intracomm:
        """Return the communicator of the ranks that share this rank's node (collective)."""
        return cast("Intracomm", comm.Split_type(mpi.api().COMM_TYPE_SHARED, comm.rank))

    def _connect(self, node_comm: Intracomm) -> NativeSlots | None:
        """Return slots of the ranks of a node, or None, with a warning, if they cannot share memory (collective)."""
        try:
            memory = share_memory(node_comm, memory_bytes(node_comm.size))
        except NoSharedMemoryError as error:
            if node_comm.rank == 0:
                warnings.warn(
                    f"the {node_comm.size} ranks of this node cannot share memory: {error}. "
                    f"They use MPI alone, which is slower. "
                    f"Set MPICOMM_SHARED_MEMORY=0 to disable shared memory and this warning.",
                    stacklevel=2,
                )
            return None
        return NativeSlots(node_comm, memory, self._advance)

    def _advance(self) -> None:
        """Let MPI progress while this rank waits for others, which may wait for a message of this rank.

        Raises:
            MpicommError: If the group was aborted, or has failed on another rank.
            RuntimeError: If another thread has destroyed the group.
        """
        if not self._comms:
            raise RuntimeError("the group was destroyed during the operation.\nDestroy it when no thread uses it.")
        self._comms[0].Iprobe()  # of the node, which has no messages: Open MPI makes no progress if it finds one
        check_unbroken(self._record)

    def revoke(self) -> None:
        """Let the calls of all ranks on the communicators of this object return, if MPI continues after failures."""
        for comm in list(self._comms):
            mpi.revoke(comm)

    def close(self) -> None:
        """Release the memory and the communicators (collective)."""
        self._choices.clear()
        self.slots = self.hierarchical = None
        if self.plain is not None:
            self.plain.close()
        while self._comms:
            mpi.free(self._comms.pop())


class _OnlyMPI(AlgorithmSelector):
    """Selects MPI for all calls."""

    def __init__(self) -> None:
        self.slots = self.hierarchical = None

    def select(self, operation: str, nbytes: int, reduction: Reduction | None = None) -> Algorithm:  # noqa: ARG002
        return Algorithm.MPI


only_mpi = _OnlyMPI()
"""The selector of operations that slots cannot run, since a rank's tensor is not on the host."""
