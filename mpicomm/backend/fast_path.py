"""The fast path of small synchronous collectives: on the caller's thread, with as little Python as possible.

A call qualifies if it is synchronous, no operation is queued, and its tensors are plain, dense and on the CPU. If it
does not qualify, the method returns None without side effects, and the operation takes the general path. Both paths
make the same MPI calls, so that a rank may take one path while another rank takes the other.
docs/performance.md breaks down the time of a call in microseconds.
"""

from __future__ import annotations

import ctypes
import datetime
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import buffers, dtypes, mpi_calls, reductions, torch_internals
from mpicomm.backend.mpi_calls import Spec
from mpicomm.backend.operations import Operations
from mpicomm.backend.reductions import Reduction
from mpicomm.backend.torch_internals import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from mpicomm.backend.work import CompletedWork
from mpicomm.watchdog import flight_recorder

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype

_MOST_BYTES = 2**31 - 1  # above this, the overhead of the general path is negligible
_LEAST_BY_NODE = 2**12  # bytes; below this, shared memory is not considered
_LEAST_CUT = 2**16  # bytes; below this, no tensor is cut into pieces
_STAGED_BYTES = 2**16  # the most bytes of a list of tensors that are copied through one buffer
_KINDS = (torch.Tensor, torch.nn.Parameter)  # exact types only: other subclasses may redefine attributes
_REDUCED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
_MOVED = frozenset({*_REDUCED, torch.bool, torch.uint8, torch.int8, torch.int16})
_SUM: Any = dist.ReduceOp.SUM
_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_NO_TIME = datetime.timedelta(0)


class FastPath:
    """The small synchronous collectives of one group.

    Every method takes the arguments of the method of `MPIProcessGroup` that has its name. It returns the completed work
    (collective); or None, without side effects, if the call does not qualify.
    """

    def __init__(self, operations: Operations) -> None:
        comm = operations.comm
        self._operations = operations
        self._executor = operations.executor
        self._record = operations.record
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size
        self._plans = [
            {dtype: reductions.plan(op, dtype, comm.size, "all_reduce") for dtype in _REDUCED if op in _OPS}
            for op in torch_internals.reduce_ops()
        ]
        self._sums = self._plans[_SUM]
        self._carriers = {dtype: dtypes.carrier(dtype) for dtype in _MOVED}
        self._in_place, self._memory_at = mpi.api().IN_PLACE, mpi.api().memory.fromaddress
        self._staging = torch.empty(_STAGED_BYTES, dtype=torch.uint8, device="cpu")
        self._staging_address = self._staging.data_ptr()

    # -- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any) -> CompletedWork | None:
        """All-reduce one tensor in place."""
        if type(opts) is not AllreduceOptions or opts.asyncOp or not _is_single(tensors):
            return None
        tensor = tensors[0]
        if not _is_plain(tensor) or (plan := self._plan(opts.reduceOp, tensor, tensor.nbytes)) is None:
            return None
        call = self._all_reduce
        return self._run("all_reduce", tensor.dtype, tensor.numel(), None, opts, tensors, call, tensor, plan)

    def _all_reduce(self, tensor: torch.Tensor, plan: Reduction) -> None:
        if tensor.nbytes >= _LEAST_BY_NODE and self._by_node(tensor, plan):
            return
        dense = tensor if plan.is_native else plan.load(tensor, keep=False)
        self._comm.Allreduce(self._in_place, self._spec(dense, plan.datatype), plan.op)
        if not plan.is_native:
            plan.store(dense, tensor)

    def _by_node(self, tensor: torch.Tensor, plan: Reduction) -> bool:
        node = self._operations.node
        return node.may_reduce("all_reduce", tensor, plan) and node.all_reduce(tensor, plan)

    def reduce(self, tensors: Any, opts: Any) -> CompletedWork | None:
        """Reduce one tensor in place on the root."""
        if type(opts) is not ReduceOptions or opts.asyncOp or not _is_single(tensors):
            return None
        tensor, root = tensors[0], opts.rootRank
        if not _is_plain(tensor) or not 0 <= root < self._size or self._prefers_node("reduce", tensor.nbytes):
            return None
        if (plan := self._plan(opts.reduceOp, tensor, tensor.nbytes)) is None or not mpi_calls.reduces_in_place():
            return None
        return self._run("reduce", tensor.dtype, tensor.numel(), root, opts, tensors, self._reduce, tensor, plan, root)

    def _reduce(self, tensor: torch.Tensor, plan: Reduction, root: int) -> None:
        is_root = self._rank == root
        dense = tensor if plan.is_native else plan.load(tensor, keep=not is_root)
        spec = self._spec(dense, plan.datatype)
        if not is_root:
            self._comm.Reduce(spec, None, plan.op, root)
            return
        self._comm.Reduce(self._in_place, spec, plan.op, root)
        if not plan.is_native:
            plan.store(dense, tensor)

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any) -> CompletedWork | None:
        """Reduce a tensor of group size times the output; each rank receives its block."""
        if type(opts) is not ReduceScatterOptions or opts.asyncOp or not self._are_blocks(source, output):
            return None
        nbytes = source.nbytes
        if buffers.overlap(source, output) or self._prefers_node("reduce_scatter", nbytes):
            return None
        if (plan := self._plan(opts.reduceOp, output, nbytes)) is None:
            return None
        call = self._reduce_scatter
        return self._run(
            "reduce_scatter", source.dtype, source.numel(), None, opts, [output], call, output, source, plan
        )

    def _reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, plan: Reduction) -> None:
        dense, result = source, output
        if not plan.is_native:
            dense, result = plan.load(source, keep=True), plan.output_buffer(output)
        blocks = self._blocks_spec(dense, plan.datatype)
        self._comm.Reduce_scatter_block(blocks, self._spec(result, plan.datatype), plan.op)
        if not plan.is_native:
            plan.store(result, output)

    # -- data movement -------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> CompletedWork | None:
        """Copy the root's tensor to all ranks."""
        if type(opts) is not BroadcastOptions or opts.asyncOp or not _is_single(tensors):
            return None
        tensor, root = tensors[0], opts.rootRank
        if not _is_plain(tensor) or not 0 <= root < self._size or self._prefers_node("broadcast", tensor.nbytes):
            return None
        if not self._fits(tensor.nbytes):
            return None
        spec = self._spec(tensor, self._carriers[tensor.dtype])
        return self._run("broadcast", tensor.dtype, tensor.numel(), root, opts, tensors, self._comm.Bcast, spec, root)

    def all_gather_single(self, output: Any, source: Any, opts: Any) -> CompletedWork | None:
        """Gather every rank's tensor into one tensor on every rank."""
        if type(opts) is not AllgatherOptions or opts.asyncOp or not self._are_blocks(output, source):
            return None
        if not self._fits_staging(source) or self._prefers_node("all_gather", output.nbytes):
            return None
        call = self._all_gather
        return self._run("all_gather", source.dtype, source.numel(), None, opts, [output], call, output, source)

    def _all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        nbytes = source.nbytes
        # The source may be this rank's block of the output, as in FSDP.
        ctypes.memmove(output.data_ptr() + self._rank * nbytes, source.data_ptr(), nbytes)
        self._comm.Allgather(self._in_place, self._blocks_spec(output, self._carriers[output.dtype]))

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> CompletedWork | None:
        """Gather every rank's tensor into a list on every rank."""
        if type(opts) is not AllgatherOptions or opts.asyncOp or not (_is_single(inputs) and _is_single(outputs)):
            return None
        source, targets = inputs[0], outputs[0]
        if not _is_plain(source) or not self._is_list_of_blocks(targets, source):
            return None
        call = self._all_gather_list
        count = source.numel() * self._size
        return self._run("all_gather", source.dtype, count, None, opts, targets, call, targets, source)

    def _all_gather_list(self, targets: list[torch.Tensor], source: torch.Tensor) -> None:
        nbytes = source.nbytes
        ctypes.memmove(self._staging_address + self._rank * nbytes, source.data_ptr(), nbytes)
        blocks = (self._staging_of(source), source.numel(), self._carriers[source.dtype])
        self._comm.Allgather(self._in_place, blocks)
        self._copy_from_staging(targets)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> CompletedWork | None:
        """Gather every rank's tensor into a list on the root."""
        if type(opts) is not GatherOptions or opts.asyncOp or not _is_single(inputs):
            return None
        source, root = inputs[0], opts.rootRank
        if not _is_plain(source) or not 0 <= root < self._size or not self._fits_staging(source):
            return None
        targets: list[torch.Tensor] = []
        if self._rank == root:
            if not _is_single(outputs) or not self._is_list_of_blocks(outputs[0], source):
                return None
            targets = outputs[0]
        return self._run(
            "gather", source.dtype, source.numel(), root, opts, targets, self._gather, targets, source, root
        )

    def _gather(self, targets: list[torch.Tensor], source: torch.Tensor, root: int) -> None:
        if not targets:
            mpi_calls.gather(self._comm, source, None, (), root)
            return
        mpi_calls.root_sees_more(self._comm, None, root)
        carrier = self._carriers[source.dtype]
        blocks = (self._staging_of(source), [source.numel()] * self._size, carrier)
        self._comm.Gatherv(self._spec(source, carrier), blocks, root)
        self._copy_from_staging(targets)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> CompletedWork | None:
        """Send one tensor of the root's list to each rank."""
        if type(opts) is not ScatterOptions or opts.asyncOp or not _is_single(outputs):
            return None
        output, root = outputs[0], opts.rootRank
        if not _is_plain(output) or not 0 <= root < self._size or not self._fits_staging(output):
            return None
        sources: list[torch.Tensor] = []
        if self._rank == root:
            if not _is_single(inputs) or not self._is_list_of_blocks(inputs[0], output):
                return None
            sources = inputs[0]
        return self._run(
            "scatter", output.dtype, output.numel(), root, opts, outputs, self._scatter, output, sources, root
        )

    def _scatter(self, output: torch.Tensor, sources: list[torch.Tensor], root: int) -> None:
        if not sources:
            mpi_calls.scatter(self._comm, None, (), output, root)
            return
        mpi_calls.root_sees_more(self._comm, None, root)
        nbytes, start, carrier = output.nbytes, self._staging_address, self._carriers[output.dtype]
        for source in sources:
            ctypes.memmove(start, source.data_ptr(), nbytes)
            start += nbytes
        blocks = (self._staging_of(output), [output.numel()] * self._size, carrier)
        self._comm.Scatterv(blocks, self._spec(output, carrier), root)

    def all_to_all_single(
        self, output: Any, source: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any
    ) -> CompletedWork | None:
        """Send each rank its rows of a tensor and receive rows from all ranks into another, in equal parts."""
        if type(opts) is not AllToAllOptions or opts.asyncOp or output_split_sizes or input_split_sizes:
            return None
        if not _is_plain(output) or not _is_plain(source) or output.dtype is not source.dtype:
            return None
        rows, source_rows = output.shape[:1], source.shape[:1]
        if output.nbytes != source.nbytes or not rows or not source_rows or not self._fits(output.nbytes):
            return None
        if rows[0] % self._size or source_rows[0] % self._size or buffers.overlap(output, source):
            return None
        carrier = self._carriers[source.dtype]
        specs = self._blocks_spec(source, carrier), self._blocks_spec(output, carrier)
        return self._run("all_to_all", source.dtype, source.numel(), None, opts, [output], self._comm.Alltoall, *specs)

    # -- conditions ----------------------------------------------------------------------------------------------

    def _plan(self, op: Any, tensor: torch.Tensor, nbytes: int) -> Reduction | None:
        """Return how to reduce `nbytes` bytes, with the result in `tensor`; None for the general path."""
        plan = (self._sums if op == _SUM else self._plans[op.op]).get(tensor.dtype)
        if plan is None or not self._fits(nbytes):
            return None
        if nbytes < _LEAST_BY_NODE and plan.is_native:
            return plan
        # torch writes inference tensors in inference mode only; a large tensor that is not native is cut into pieces
        return None if tensor.is_inference() or not (nbytes < _LEAST_CUT or plan.is_native) else plan

    def _fits(self, nbytes: int) -> bool:
        """Return whether an operation on so many bytes is one MPI call, whatever the devices of other ranks."""
        return nbytes <= self._operations.transport.whole_bytes and nbytes <= _MOST_BYTES

    def _fits_staging(self, block: torch.Tensor) -> bool:
        """Return whether a copy of a block for each rank is faster than the general path."""
        nbytes = block.nbytes * self._size
        return nbytes <= _STAGED_BYTES and self._fits(nbytes)

    def _prefers_node(self, operation: str, nbytes: int) -> bool:
        return nbytes >= _LEAST_BY_NODE and self._operations.node.is_worth_it(operation, nbytes)

    def _are_blocks(self, large: Any, small: Any) -> bool:
        """Return whether `large` holds a block like `small` for each rank."""
        if not _is_plain(large) or not _is_plain(small):
            return False
        return large.dtype is small.dtype and large.numel() == small.numel() * self._size

    def _is_list_of_blocks(self, tensors: Any, one: torch.Tensor) -> bool:
        """Return whether a list has a separate tensor like `one` for each rank, small enough to copy all of them."""
        nbytes, dtype = one.nbytes, one.dtype
        if type(tensors) is not list or len(tensors) != self._size or not self._fits_staging(one):
            return False
        for each in tensors:
            if not _is_plain(each) or each.dtype is not dtype or each.nbytes != nbytes:
                return False
        places = sorted([each.data_ptr() for each in tensors])
        return all([after - before >= nbytes for before, after in itertools.pairwise(places)])  # noqa: C419  faster

    # -- running -------------------------------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        dtype: torch.dtype,
        count: int,
        root: int | None,
        opts: Any,
        results: list[torch.Tensor],
        call: Callable[..., object],
        *arguments: Any,
    ) -> CompletedWork | None:
        """Record and run a call on this thread, unless operations are queued."""
        executor = self._executor
        if not executor.take_turn():
            return None
        operation = None
        try:
            operation = flight_recorder.note(self._record, name, dtype, count, root, False, True)
            if (timeout := opts.timeout) > _NO_TIME:
                operation.limit = timeout.total_seconds()
            call(*arguments)
        except BaseException as error:
            if operation is not None:
                executor.mark_broken(operation, error)
            raise
        finally:
            if operation is not None:
                operation.finish()
            executor.give_turn_back()
        work = CompletedWork()
        work.tensors = results
        return work

    def _staging_of(self, block: torch.Tensor) -> object:
        """Return memory for a block like `block` of each rank."""
        return self._memory_at(self._staging_address, block.nbytes * self._size)

    def _copy_from_staging(self, targets: list[torch.Tensor]) -> None:
        start, nbytes = self._staging_address, targets[0].nbytes
        for target in targets:
            ctypes.memmove(target.data_ptr(), start, nbytes)
            start += nbytes

    def _spec(self, dense: torch.Tensor, datatype: Datatype) -> Spec:
        """Return mpi4py's buffer specification of a dense tensor."""
        return self._memory_at(dense.data_ptr(), dense.nbytes), dense.numel(), datatype

    def _blocks_spec(self, dense: torch.Tensor, datatype: Datatype) -> Spec:
        """Return the specification of a dense tensor with one block per rank."""
        return self._memory_at(dense.data_ptr(), dense.nbytes), dense.numel() // self._size, datatype


def _is_single(values: Any) -> bool:
    return type(values) is list and len(values) == 1


def _is_plain(tensor: Any) -> bool:
    """Return whether MPI can access the elements of a tensor in their order, and it has any."""
    return (
        type(tensor) in _KINDS
        and tensor.dtype in _MOVED
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
    )
