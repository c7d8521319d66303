"""The fast path of synchronous and asynchronous collectives on plain tensors, with as little Python as possible.

A call qualifies if its tensors are plain: dense, on the CPU, and of a common dtype. If it does not qualify, the method
returns None without side effects, and the operation takes the general path, which prepares such tensors. Both paths run
the same methods of `DenseCollectives`, so that a rank may take one path while another rank takes the other.
benchmarks/README.md breaks down the time of a call in microseconds.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import torch_internals
from mpicomm.backend.execution.executor import Executor
from mpicomm.backend.execution.work import CompletedWork, QueuedWork
from mpicomm.backend.transfer import reductions
from mpicomm.backend.transfer.reductions import Reduction
from mpicomm.torch_internals import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

_KINDS = (torch.Tensor, torch.nn.Parameter)  # exact types only: other subclasses may redefine attributes
_REDUCED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
_MOVED = frozenset({*_REDUCED, torch.bool, torch.uint8, torch.int8, torch.int16})
_SUM: Any = dist.ReduceOp.SUM
_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR)

Work = CompletedWork | QueuedWork | None


class FastPath:
    """The collectives of one group on plain tensors.

    Every method takes the arguments of the operation that has its name in the table of operations.py. It returns the
    work (collective); or None, without side effects, if the call does not qualify.
    """

    def __init__(self, executor: Executor) -> None:
        self._dense = executor.dense
        self._transport = executor.transport
        self._submit = executor.submit_plain
        self._rank, self._size = executor.comm.rank, executor.comm.size
        self._reductions = [
            {dtype: reductions.reduction_for(op, dtype, self._size, "all_reduce") for dtype in _dtypes_of(op)}
            for op in torch_internals.reduce_ops()
        ]
        self._sums = self._reductions[_SUM]

    # -- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any) -> Work:
        """All-reduce one tensor in place."""
        if type(opts) is not AllreduceOptions or not _is_single(tensors) or not self._is_plain(tensor := tensors[0]):
            return None
        if (reduction := self._reduction(opts.reduceOp, tensor.dtype)) is None:
            return None
        return self._submit(
            "all_reduce", tensor.dtype, tensor.numel(), None, opts, tensors, self._dense.all_reduce, tensor, reduction
        )

    def reduce(self, tensors: Any, opts: Any) -> Work:
        """Reduce one tensor in place on the root."""
        if type(opts) is not ReduceOptions or not _is_single(tensors) or not self._is_plain(tensor := tensors[0]):
            return None
        root, reduction = opts.rootRank, self._reduction(opts.reduceOp, tensor.dtype)
        if reduction is None or not 0 <= root < self._size:
            return None
        return self._submit(
            "reduce", tensor.dtype, tensor.numel(), root, opts, tensors, self._dense.reduce, tensor, reduction, root
        )

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any) -> Work:
        """Reduce a tensor of group size times the output; each rank receives its block."""
        if type(opts) is not ReduceScatterOptions or not self._are_blocks(source, output):
            return None
        if (reduction := self._reduction(opts.reduceOp, output.dtype)) is None:
            return None
        run = self._dense.reduce_scatter
        return self._submit(
            "reduce_scatter", source.dtype, source.numel(), None, opts, [output], run, output, source, reduction
        )

    # -- data movement -------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        """Copy the root's tensor to all ranks."""
        if type(opts) is not BroadcastOptions or not _is_single(tensors) or not self._is_plain(tensor := tensors[0]):
            return None
        root = opts.rootRank
        if not 0 <= root < self._size:
            return None
        return self._submit(
            "broadcast", tensor.dtype, tensor.numel(), root, opts, tensors, self._dense.broadcast, tensor, root
        )

    def all_gather_single(self, output: Any, source: Any, opts: Any) -> Work:
        """Gather every rank's tensor into one tensor on every rank."""
        if type(opts) is not AllgatherOptions or not self._are_blocks(output, source):
            return None
        run = self._dense.all_gather
        return self._submit("all_gather", source.dtype, source.numel(), None, opts, [output], run, output, source)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """Gather every rank's tensor into a list on every rank."""
        if type(opts) is not AllgatherOptions or not _is_single(inputs) or not _is_single(outputs):
            return None
        source, targets = inputs[0], outputs[0]
        if not self._is_plain(source) or not self._is_list_of_blocks(targets, source):
            return None
        count = source.numel() * self._size
        run = self._dense.all_gather_list
        return self._submit("all_gather", source.dtype, count, None, opts, targets, run, targets, source)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """Gather every rank's tensor into a list on the root."""
        if type(opts) is not GatherOptions or not _is_single(inputs) or not self._is_plain(source := inputs[0]):
            return None
        root = opts.rootRank
        targets: list[torch.Tensor] = []
        if self._rank == root:
            if not _is_single(outputs) or not self._is_list_of_blocks(outputs[0], source):
                return None
            targets = outputs[0]
        if not 0 <= root < self._size:
            return None
        run = self._dense.gather
        return self._submit("gather", source.dtype, source.numel(), root, opts, targets, run, targets, source, root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """Send one tensor of the root's list to each rank."""
        if type(opts) is not ScatterOptions or not _is_single(outputs) or not self._is_plain(output := outputs[0]):
            return None
        root = opts.rootRank
        sources: list[torch.Tensor] = []
        if self._rank == root:
            if not _is_single(inputs) or not self._is_list_of_blocks(inputs[0], output):
                return None
            sources = inputs[0]
        if not 0 <= root < self._size:
            return None
        run = self._dense.scatter
        return self._submit("scatter", output.dtype, output.numel(), root, opts, outputs, run, output, sources, root)

    def all_to_all_single(
        self, output: Any, source: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any
    ) -> Work:
        """Send each rank its rows of a tensor and receive rows from all ranks into another, in equal parts."""
        if type(opts) is not AllToAllOptions or output_split_sizes or input_split_sizes:
            return None
        if not self._is_plain(output) or not self._is_plain(source) or output.dtype is not source.dtype:
            return None
        rows, source_rows = output.shape[:1], source.shape[:1]
        if output.nbytes != source.nbytes or not rows or not source_rows:
            return None
        if rows[0] % self._size or source_rows[0] % self._size:
            return None
        run = self._dense.all_to_all
        return self._submit("all_to_all", source.dtype, source.numel(), None, opts, [output], run, output, source)

    # -- conditions ----------------------------------------------------------------------------------------------

    def _reduction(self, op: Any, dtype: torch.dtype) -> Reduction | None:
        """Return how to reduce tensors of a dtype; None for the general path."""
        return (self._sums if op == _SUM else self._reductions[op.op]).get(dtype)

    def _is_plain(self, tensor: Any) -> bool:
        """Return whether MPI can access the elements of a tensor in their order, and it has any.

        If a rank passes GPU tensors through host memory, larger tensors are sent in chunks.
        """
        return (
            type(tensor) in _KINDS
            and tensor.dtype in _MOVED
            and tensor.layout is torch.strided
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and tensor.data_ptr() != 0
            and tensor.nbytes <= self._transport.whole_bytes
        )

    def _are_blocks(self, large: Any, small: Any) -> bool:
        """Return whether `large` holds a block like `small` for each rank."""
        if not self._is_plain(large) or not self._is_plain(small):
            return False
        return large.dtype is small.dtype and large.numel() == small.numel() * self._size

    def _is_list_of_blocks(self, tensors: Any, block: torch.Tensor) -> bool:
        """Return whether a list has a separate tensor like `block` for each rank."""
        nbytes, dtype = block.nbytes, block.dtype
        if type(tensors) is not list or len(tensors) != self._size:
            return False
        if nbytes * self._size > self._transport.whole_bytes:
            return False
        for tensor in tensors:
            if not self._is_plain(tensor) or tensor.dtype is not dtype or tensor.nbytes != nbytes:
                return False
        addresses = sorted([tensor.data_ptr() for tensor in tensors])
        return all([following - address >= nbytes for address, following in itertools.pairwise(addresses)])  # noqa: C419  faster


def _dtypes_of(op: Any) -> tuple[torch.dtype, ...]:
    if op in _BITWISE:
        return (torch.int32, torch.int64)
    return _REDUCED if op in _OPS else ()


def _is_single(values: Any) -> bool:
    return type(values) is list and len(values) == 1
