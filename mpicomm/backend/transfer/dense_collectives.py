"""The collectives of a group on dense tensors in memory that MPI can access, on the host or on a GPU.

Every operation selects its algorithm here: MPI calls, or the shared memory of the nodes. The selection depends on the
operation, the size, the dtype and the nodes of the ranks, which are equal on all ranks. All operations block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpicomm import mpi
from mpicomm.backend.transfer import buffers, dtypes, mpi_calls
from mpicomm.backend.transfer.algorithms import Algorithm, AlgorithmSelector
from mpicomm.backend.transfer.buffers import Tensors
from mpicomm.backend.transfer.reductions import Reduction
from mpicomm.backend.transfer.slots import NativeSlots

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_UNKNOWN_BYTES = 0  # the size of blocks that may differ, which not all ranks know
_LIST_BUFFER_BYTES = 2**16  # larger lists are not copied through the kept buffer; fewer than MPI's largest count


class DenseCollectives:
    """The collectives of one group on dense tensors, whose number, dtypes and sizes the caller has checked.

    Inputs may overlap outputs. Only one thread may call these methods at a time.
    """

    def __init__(self, comm: Intracomm, algorithms: AlgorithmSelector) -> None:
        self.comm = comm
        self._algorithms = algorithms
        # Kept, because the calls on a destroyed group are checked when its communicator no longer exists.
        self.rank, self.size = comm.rank, comm.size
        self._memory_at = mpi.api().memory.fromaddress
        with torch.inference_mode(False):
            self._list_buffer = torch.empty(_LIST_BUFFER_BYTES, dtype=torch.uint8, device="cpu")
        self._list_buffer_address = self._list_buffer.data_ptr()

    # -- reductions ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """All-reduce a tensor in place."""
        algorithm = self._algorithms.select("all_reduce", tensor.nbytes, reduction)
        if algorithm is Algorithm.SLOTS and self._slots.reduce(
            tensor, divisor=reduction.divisor, extreme=reduction.extreme
        ):
            return
        hierarchical = self._algorithms.hierarchical
        if algorithm is Algorithm.HIERARCHICAL and hierarchical is not None and hierarchical.run(tensor, reduction):
            return
        if reduction.is_native:
            mpi_calls.all_reduce(self.comm, tensor, reduction.datatype, reduction.op)
            return
        for piece in reduction.pieces(tensor):
            dense = reduction.load(piece, keep=False)
            mpi_calls.all_reduce(self.comm, dense, reduction.datatype, reduction.op)
            reduction.store(dense, piece)

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int) -> None:
        """Reduce in place on the root; the tensors of other ranks keep their content."""
        algorithm = self._algorithms.select("reduce", tensor.nbytes, reduction)
        if algorithm is Algorithm.SLOTS and self._slots.reduce(
            tensor, root, divisor=reduction.divisor, extreme=reduction.extreme
        ):
            return
        if reduction.is_native:
            mpi_calls.reduce(self.comm, tensor, reduction.datatype, reduction.op, root)
            return
        is_root = self.rank == root
        for piece in reduction.pieces(tensor):
            dense = reduction.load(piece, keep=not is_root)
            mpi_calls.reduce(self.comm, dense, reduction.datatype, reduction.op, root)
            if is_root:
                reduction.store(dense, piece)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, reduction: Reduction, counts: Sequence[int] | None = None
    ) -> None:
        """Reduce the source, with `counts[r]` elements for rank r (None: equally many) that it receives."""
        algorithm = Algorithm.MPI
        if counts is None:
            algorithm = self._algorithms.select("reduce_scatter", source.nbytes, reduction)
        is_in_place = algorithm is Algorithm.SLOTS and self._is_own_block(output, source)
        is_apart = is_in_place or not buffers.overlap(source, output)
        result = output if is_apart else torch.empty_like(output)
        if algorithm is Algorithm.SLOTS and self._slots.reduce_scatter(
            source, result, divisor=reduction.divisor, extreme=reduction.extreme
        ):
            buffers.unpack(result, output)
            return
        if is_in_place:  # MPI needs separate memory
            result = torch.empty_like(output)
        if reduction.is_native:
            mpi_calls.reduce_scatter(self.comm, source, counts, result, reduction.datatype, reduction.op)
            buffers.unpack(result, output)
        else:
            dense, total = reduction.load(source, keep=True), reduction.output_buffer(result)
            mpi_calls.reduce_scatter(self.comm, dense, counts, total, reduction.datatype, reduction.op)
            reduction.store(total, output)

    def reduce_scatter_list(self, output: torch.Tensor, sources: Tensors, reduction: Reduction) -> None:
        """Reduce `sources[r]` of all ranks into rank r's output; sizes may differ between ranks."""
        self.reduce_scatter(output, buffers.pack_all(sources), reduction, buffers.uneven_counts(sources))

    def _is_own_block(self, block: torch.Tensor, whole: torch.Tensor) -> bool:
        """Return whether a block is in its place in a tensor with a block for each rank."""
        return block.data_ptr() == whole.data_ptr() + self.rank * block.nbytes

    # -- data movement -------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to all ranks."""
        algorithm = self._algorithms.select("broadcast", tensor.nbytes)
        if algorithm is Algorithm.SLOTS and self._slots.broadcast(tensor, root):
            return
        mpi_calls.broadcast(self.comm, tensor, root)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Gather every rank's source into the output, in rank order; the source may be this rank's block of it."""
        algorithm = self._algorithms.select("all_gather", output.nbytes)
        if algorithm is Algorithm.SLOTS and self._slots.all_gather(output, self._without_overlap(source, output)):
            return
        self._copy_into(source, output, self.rank * source.numel())
        mpi_calls.all_gather(self.comm, output, None)

    def all_gather_list(self, outputs: Tensors, source: torch.Tensor) -> None:
        """Gather rank r's source into `outputs[r]`; sizes may differ between ranks."""
        nbytes = outputs[0].nbytes
        is_even = all([tensor.nbytes == nbytes for tensor in outputs])  # noqa: C419  faster
        algorithm = self._algorithms.select("all_gather", source.nbytes * self.size) if is_even else Algorithm.MPI
        if algorithm is Algorithm.SLOTS and self._slots.all_gather_list(
            outputs, self._without_overlap(source, *outputs)
        ):
            return
        if self._fits_list_buffer(outputs, source):  # then nbytes is that of the source, too
            ctypes.memmove(self._list_buffer_address + self.rank * nbytes, source.data_ptr(), nbytes)
            blocks = (self._list_buffer_of(source), source.numel(), dtypes.carrier(source.dtype))
            self.comm.Allgather(mpi.api().IN_PLACE, blocks)
            self._copy_from_list_buffer(outputs)
            return
        flat, counts = buffers.output_buffer_of_all(outputs), buffers.uneven_counts(outputs)
        self._copy_into(source, flat, sum(buffers.counts(outputs[: self.rank])))
        mpi_calls.all_gather(self.comm, flat, counts)
        buffers.unpack_all(flat, outputs)

    def gather(self, outputs: Tensors, source: torch.Tensor, root: int) -> None:
        """Gather rank r's source into `outputs[r]` on the root; `outputs` is empty on other ranks."""
        algorithm = self._algorithms.select("gather", _UNKNOWN_BYTES)
        if algorithm is Algorithm.SLOTS and self._slots.gather(outputs, self._without_overlap(source, *outputs), root):
            return
        if not outputs:
            mpi_calls.gather(self.comm, source, None, (), root)
        elif self._fits_list_buffer(outputs, source):
            blocks = (self._list_buffer_of(source), [source.numel()] * self.size, dtypes.carrier(source.dtype))
            self.comm.Gatherv(mpi_calls.spec(source), blocks, root)
            self._copy_from_list_buffer(outputs)
        else:
            flat = buffers.output_buffer_of_all(outputs)
            mpi_calls.gather(self.comm, buffers.without_alias(source, flat), flat, buffers.counts(outputs), root)
            buffers.unpack_all(flat, outputs)

    def gather_single(self, output: torch.Tensor | None, source: torch.Tensor, root: int) -> None:
        """Gather the sources into the output on the root, in rank order; the output is None on other ranks."""
        if self._algorithms.select("gather", _UNKNOWN_BYTES) is Algorithm.SLOTS:
            self.gather([] if output is None else output.detach().view(-1).split(source.numel()), source, root)
            return
        counts = [source.numel()] * self.size
        mpi_calls.gather(self.comm, buffers.without_alias(source, output), output, counts, root)

    def scatter(self, output: torch.Tensor, sources: Tensors, root: int) -> None:
        """Send `sources[r]` of the root to rank r's output; `sources` is empty on other ranks."""
        if self._algorithms.select("scatter", _UNKNOWN_BYTES) is Algorithm.SLOTS:
            tensors = [self._without_overlap(source, output) for source in sources]
            if self._slots.scatter(output, tensors, root):
                return
        if not sources:
            mpi_calls.scatter(self.comm, None, (), output, root)
        elif self._fits_list_buffer(sources, output):
            nbytes, start = output.nbytes, self._list_buffer_address
            for source in sources:
                ctypes.memmove(start, source.data_ptr(), nbytes)
                start += nbytes
            blocks = (self._list_buffer_of(output), [output.numel()] * self.size, dtypes.carrier(output.dtype))
            self.comm.Scatterv(blocks, mpi_calls.spec(output), root)
        else:
            flat = buffers.without_alias(buffers.pack_all(sources), output)
            mpi_calls.scatter(self.comm, flat, buffers.counts(sources), output, root)

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int] | None = None,
        source_counts: Sequence[int] | None = None,
    ) -> None:
        """Send `source_counts[r]` elements of the source to rank r; receive `counts[r]` elements from it.

        Args:
            counts: None, like `source_counts`, if all blocks of all ranks have the same size; then None on all ranks.
        """
        source = buffers.without_alias(source, output)
        algorithm = Algorithm.MPI if counts is not None else self._algorithms.select("all_to_all", source.nbytes)
        if algorithm is Algorithm.SLOTS and self._slots.all_to_all(output, source):
            return
        mpi_calls.all_to_all(self.comm, source, source_counts, output, counts)

    def all_to_all_list(self, outputs: Tensors, sources: Tensors) -> None:
        """Send `sources[r]` to rank r and receive its tensor in `outputs[r]`; sizes may differ."""
        flat = buffers.output_buffer_of_all(outputs)
        self.all_to_all(flat, buffers.pack_all(sources), buffers.counts(outputs), buffers.counts(sources))
        buffers.unpack_all(flat, outputs)

    def _without_overlap(self, source: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
        """Return a block of this rank, or a copy if slots would write over a part of it before they read that part."""
        if source.nbytes <= self._slots.step_bytes:
            return source
        for other in outputs:
            if buffers.overlap(source, other) and (source.data_ptr() - other.data_ptr()) % source.nbytes:
                return source.detach().clone()
        return source

    def _copy_into(self, source: torch.Tensor, output: torch.Tensor, start: int) -> None:
        """Copy this rank's part to element `start` of the output, unless it is there already, as in FSDP."""
        address, place = source.data_ptr(), output.data_ptr() + start * source.itemsize
        if address == place:
            return
        nbytes, are_on_host = source.nbytes, source.is_cpu and output.is_cpu
        if are_on_host and (nbytes <= _LIST_BUFFER_BYTES or abs(place - address) < nbytes):
            ctypes.memmove(place, address, nbytes)
        else:  # torch copies with several threads, and refuses memory that overlaps
            block = output.detach().view(-1).narrow(0, start, source.numel())
            block.copy_(buffers.without_alias(source.detach().view(-1), block))

    @property
    def _slots(self) -> NativeSlots:
        slots = self._algorithms.slots
        assert slots is not None, "the algorithm is SLOTS"
        return slots

    # -- small lists: one copy through a buffer that is kept -----------------------------------------------------

    def _fits_list_buffer(self, tensors: Tensors, block: torch.Tensor) -> bool:
        """Return whether a list has tensors like `block`, small enough to copy all of them through the buffer."""
        nbytes = block.nbytes
        return (
            nbytes * self.size <= _LIST_BUFFER_BYTES
            and block.is_cpu
            and all([tensor.nbytes == nbytes and tensor.is_cpu for tensor in tensors])  # noqa: C419  faster
        )

    def _list_buffer_of(self, block: torch.Tensor) -> object:
        """Return memory for a block like `block` of each rank."""
        return self._memory_at(self._list_buffer_address, block.nbytes * self.size)

    def _copy_from_list_buffer(self, targets: Tensors) -> None:
        start, nbytes = self._list_buffer_address, targets[0].nbytes
        for target in targets:
            ctypes.memmove(target.data_ptr(), start, nbytes)
            start += nbytes
