"""Runs the operations that are ready on all ranks, by the collectives of the process set's group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mpicomm import torch_internals
from mpicomm.horovod import submission
from mpicomm.horovod.group_calls import GroupCalls
from mpicomm.horovod.negotiation import Ready
from mpicomm.horovod.submission import Adasum, HorovodInternalError, Submission

_LONG_BYTES = 2**20  # tensors of this size are not fused: the two copies cost more than an operation of their own
_MOST_LAYOUTS = 64  # of the fusion buffer that are kept; a training step has a few


class Pair(NamedTuple):
    """The input and the output of a reduction; one tensor if it is in place."""

    source: torch.Tensor
    output: torch.Tensor


class DataOperations:
    """The operations of one process set. Every method is collective, with equal arguments on all ranks."""

    def __init__(self, calls: GroupCalls, fusion_threshold: int) -> None:
        """Create the operations.

        Args:
            fusion_threshold: Bytes up to which tensors are reduced together.
        """
        self._calls, self._threshold = calls, fusion_threshold
        self._buffers: dict[tuple[torch.dtype, torch.device], _FusionBuffer] = {}
        self._runners: dict[str, Callable[[list[Ready]], None]] = {
            submission.ALLREDUCE: self._allreduce,
            submission.ALLGATHER: self._allgather,
            submission.BROADCAST: self._broadcast,
            submission.ALLTOALL: self._alltoall,
            submission.REDUCESCATTER: self._reducescatter,
            submission.BARRIER: self._barrier,
            submission.JOIN: self._join,
        }

    def run(self, items: Sequence[Ready]) -> None:
        """Run the operations and complete the submissions."""
        by_kind: dict[str, list[Ready]] = {}
        for item in items:
            if item.error:
                _fail(item, HorovodInternalError(item.error))
            else:
                by_kind.setdefault(item.signature.kind, []).append(item)
        with torch.no_grad():
            for kind, ready in by_kind.items():
                try:
                    for item in ready:
                        _wait_for_inputs(item)
                    self._runners[kind](ready)
                except Exception as error:  # noqa: BLE001  a submission that is not finished would be awaited forever
                    for item in ready:
                        _fail(item, error)

    # -- reductions ------------------------------------------------------------------------------------------------

    def _allreduce(self, items: list[Ready]) -> None:
        # 1. the tensors that can be fused: of one dtype, device, operation and factors
        buckets: dict[tuple[Any, ...], list[Pair]] = {}
        for item in items:
            signature = item.signature
            for pair in _pairs(item):
                key = pair.source.dtype, pair.source.device, signature.op, signature.prescale, signature.postscale
                buckets.setdefault(key, []).append(pair)
        # 2. reduce
        for (dtype, device, op, prescale, postscale), pairs in buckets.items():
            for batch in _batches(pairs, self._threshold):
                if len(batch) == 1:
                    source, whole = batch[0]
                    parts = [whole]
                    if whole is not source:
                        whole.copy_(source)
                else:
                    if (dtype, device) not in self._buffers:
                        self._buffers[dtype, device] = _FusionBuffer(dtype, device)
                    whole, parts = self._buffers[dtype, device].layout(batch)
                    torch_internals.copy_all(parts, [pair.source for pair in batch])
                _scale(whole, prescale)
                if op == Adasum:
                    _reduce_by_adasum(parts, whole, self._calls.group)
                else:
                    self._calls.all_reduce(whole, op)
                _scale(whole, postscale)
                if len(batch) > 1:
                    torch_internals.copy_all([pair.output for pair in batch], parts)
        for item in items:
            if item.submission is not None:
                _finish(item, item.submission.outputs)

    def _reducescatter(self, items: list[Ready]) -> None:
        for item in items:
            signature, outputs = item.signature, []
            for source in _own(item).tensors:
                rows, rest = divmod(source.shape[0], self._calls.size)
                counts = [rows + (rank < rest) for rank in range(self._calls.size)]
                if signature.prescale != 1:
                    source = source.clone()  # noqa: PLW2901  the caller's tensor must not change
                    _scale(source, signature.prescale)
                output = source.new_empty((counts[self._calls.rank], *source.shape[1:]))
                chunks = [chunk.contiguous() for chunk in source.split(counts)]
                self._calls.reduce_scatter(output, chunks, signature.op)
                _scale(output, signature.postscale)
                outputs.append(output)
            _finish(item, outputs)

    # -- data movement ---------------------------------------------------------------------------------------------

    def _broadcast(self, items: list[Ready]) -> None:
        for item in items:
            root = item.signature.root
            for pair in _pairs(item):
                if pair.output is not pair.source and self._calls.rank == root:
                    pair.output.copy_(pair.source)
                self._calls.broadcast(pair.output, root)
            _finish(item, _own(item).outputs)

    def _allgather(self, items: list[Ready]) -> None:
        sources = [source.contiguous() for item in items for source in _own(item).tensors]
        rows = self._calls.all_gather_numbers([source.shape[0] for source in sources])
        gathered = iter(
            [self._gather_rows(source, [numbers[index] for numbers in rows]) for index, source in enumerate(sources)]
        )
        for item in items:
            _finish(item, list(itertools.islice(gathered, len(item.signature.layouts))))

    def _gather_rows(self, source: torch.Tensor, rows: list[int]) -> torch.Tensor:
        output = source.new_empty((sum(rows), *source.shape[1:]))
        if min(rows) == max(rows):
            self._calls.all_gather(output, source)
        else:
            self._calls.all_gather_list(output.split(rows), source)
        return output

    def _alltoall(self, items: list[Ready]) -> None:
        # 1. the numbers of rows that this rank receives from every rank, for each operation
        splits = [_own(item).splits for item in items]
        sent = [counts.tolist() for counts in splits]  # type: ignore[union-attr]
        received = self._calls.all_to_all_numbers([list(column) for column in zip(*sent, strict=True)])
        # 2. the rows
        for index, item in enumerate(items):
            (source,), counts = _own(item).tensors, [numbers[index] for numbers in received]
            output = source.new_empty((sum(counts), *source.shape[1:]))
            rows = source.contiguous()[: sum(sent[index])]
            self._calls.all_to_all(output, rows, counts, sent[index])
            _finish(item, [output, torch.tensor(counts, dtype=torch.int32, device=splits[index].device)])  # type: ignore[union-attr]

    # -- without data ----------------------------------------------------------------------------------------------

    def _barrier(self, items: list[Ready]) -> None:
        for item in items:  # the negotiation was the barrier
            _finish(item)

    def _join(self, items: list[Ready]) -> None:
        for item in items:
            _finish(item, [item.last_joined])


def _own(item: Ready) -> Submission:
    """Return this rank's submission of an operation that is not supported after a join."""
    assert item.submission is not None
    return item.submission


def _wait_for_inputs(item: Ready) -> None:
    if item.submission is not None and item.submission.events:
        item.submission.wait_for_events([*item.submission.tensors, *item.submission.outputs])


def _finish(item: Ready, result: Sequence[Any] = ()) -> None:
    if item.submission is not None:
        if item.submission.events:
            item.submission.record_events(result)
        item.submission.finish(result)


def _fail(item: Ready, error: Exception) -> None:
    if item.submission is not None and not item.submission.is_done:
        item.submission.finish(error=error)


def _pairs(item: Ready) -> list[Pair]:
    """Return the inputs and outputs; zeros if this rank has joined."""
    if item.submission is not None:
        return [Pair(*pair) for pair in zip(item.submission.tensors, item.submission.outputs, strict=True)]
    zeros = [torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device) for layout in item.signature.layouts]
    return [Pair(tensor, tensor) for tensor in zeros]


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:  # the factor of integers may be a fraction
        tensor.copy_(tensor.double().mul_(factor))


# -- fusion ------------------------------------------------------------------------------------------------------------


class _FusionBuffer:
    """The memory in which the tensors of one dtype and device are fused."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)
        self._layouts: dict[tuple[torch.Size, ...], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def layout(self, batch: Sequence[Pair]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the fused tensor and its parts, in the shapes of the tensors of the batch."""
        shapes = tuple([pair.source.shape for pair in batch])
        layout = self._layouts.get(shapes)
        if layout is None:
            counts = [pair.source.numel() for pair in batch]
            if sum(counts) > self._memory.numel() or len(self._layouts) == _MOST_LAYOUTS:
                self._layouts.clear()
            if sum(counts) > self._memory.numel():
                self._memory = torch.empty(sum(counts), dtype=self._memory.dtype, device=self._memory.device)
            whole = self._memory[: sum(counts)]
            parts = [part.view(shape) for part, shape in zip(whole.split(counts), shapes, strict=True)]
            layout = self._layouts[shapes] = whole, parts
        return layout


def _batches(pairs: Sequence[Pair], threshold: int) -> Iterator[list[Pair]]:
    """Yield the tensors in batches of at most `threshold` bytes; long tensors are batches of their own."""
    limit = min(threshold, _LONG_BYTES)
    batch: list[Pair] = []
    batch_bytes = 0
    for pair in pairs:
        nbytes = pair.source.nbytes
        if nbytes >= limit:
            yield [pair]
            continue
        if batch_bytes + nbytes > threshold:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(pair)
        batch_bytes += nbytes
    if batch:
        yield batch


# -- Adasum ------------------------------------------------------------------------------------------------------------


def _reduce_by_adasum(parts: Sequence[torch.Tensor], whole: torch.Tensor, group: Any) -> None:
    """Add gradients that are orthogonal, and average gradients that are parallel, in place.

    Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. Pairs of ranks at the distances
    1, 2, 4, ... exchange their partial results (recursive doubling): the number of ranks must be a power of two.

    Args:
        parts: The tensors; each is reduced with coefficients of its own.
        whole: The memory of all parts, which one message exchanges.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = whole.new_empty(whole.shape)
    distance = 1
    while distance < size:
        partner = rank ^ distance
        sent = dist.isend(whole, group=group, group_dst=partner)
        dist.recv(received, group=group, group_src=partner)
        torch_internals.wait_for(sent)
        counts = [part.numel() for part in parts]
        for part, other in zip(parts, received.view(-1).split(counts), strict=True):
            part.copy_(_combined(part, other.view(part.shape)))
        distance *= 2


def _combined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    # Symmetric in both arguments, also in its roundings, so that both ranks compute the same bits.
    a, b = first.double(), second.double()
    dot = (a * b).sum()
    return _coefficient(dot, a) * a + _coefficient(dot, b) * b


def _coefficient(dot: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    norm = (vector * vector).sum()
    return torch.where(norm > 0, 1 - dot / (2 * norm), torch.ones_like(norm))
