"""Runs the operations that are ready on all ranks, by the collectives of the process set's group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpicomm.horovod import adasum, gpu_order, submission
from mpicomm.horovod.exceptions import HorovodInternalError
from mpicomm.horovod.fusion import FusionBuffer, Pair
from mpicomm.horovod.group_calls import GroupCalls
from mpicomm.horovod.group_exchange import GroupExchange
from mpicomm.horovod.negotiation import Ready
from mpicomm.horovod.reduce_op import Adasum
from mpicomm.horovod.submission import Layout


class DataOperations:
    """The operations of one process set. Every method is collective, with equal arguments on all ranks."""

    def __init__(self, calls: GroupCalls, exchange: GroupExchange, fusion_threshold: int) -> None:
        self._calls, self._exchange, self._threshold = calls, exchange, fusion_threshold
        self._buffers: dict[tuple[torch.dtype, torch.device], FusionBuffer] = {}
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
        for each in items:
            if each.error:
                _finish(each, error=HorovodInternalError(each.error))
            else:
                by_kind.setdefault(each.signature.kind, []).append(each)
        with torch.no_grad():
            for kind, ready in by_kind.items():
                gpu_order.wait([event for each in ready if each.submission for event in each.submission.events])
                try:
                    self._runners[kind](ready)
                except (ValueError, TypeError, RuntimeError) as error:
                    for each in ready:
                        _finish(each, error=error)

    # -- reductions ------------------------------------------------------------------------------------------------

    def _allreduce(self, items: list[Ready]) -> None:
        # 1. the tensors that can be fused: of one dtype, device, operation and factors
        buckets: dict[tuple[Any, ...], list[Pair]] = {}
        for each in items:
            signature = each.signature
            for layout, pair in zip(signature.layouts, _pairs(each), strict=True):
                key = layout.dtype, pair.source.device, signature.op, signature.prescale, signature.postscale
                buckets.setdefault(key, []).append(pair)
        # 2. reduce
        for (dtype, device, op, prescale, postscale), pairs in buckets.items():

            def run(
                whole: torch.Tensor,
                parts: Sequence[torch.Tensor],
                op: int = op,
                prescale: float = prescale,
                postscale: float = postscale,
            ) -> None:
                _scale(whole, prescale)
                self._reduce(whole, parts, op)
                _scale(whole, postscale)

            buffer = self._buffers.get((dtype, device))
            if buffer is None:
                buffer = self._buffers[dtype, device] = FusionBuffer(dtype, device)
            buffer.reduce(pairs, self._threshold, run)
        for each in items:
            if each.submission is not None:
                _finish(each, each.submission.outputs)

    def _reduce(self, whole: torch.Tensor, parts: Sequence[torch.Tensor], op: int) -> None:
        if op == Adasum:
            adasum.reduce(parts, whole, self._calls.group)
        else:
            self._calls.all_reduce(whole, op)

    def _reducescatter(self, items: list[Ready]) -> None:
        for each in items:
            signature, outputs = each.signature, []
            for source in each.submission.tensors:  # type: ignore[union-attr]
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
            _finish(each, outputs)

    # -- data movement ---------------------------------------------------------------------------------------------

    def _broadcast(self, items: list[Ready]) -> None:
        for each in items:
            for pair in _pairs(each):
                if pair.output is not pair.source and self._calls.rank == each.signature.root:
                    pair.output.copy_(pair.source)
                self._calls.broadcast(pair.output, each.signature.root)
            _finish(each, each.submission.outputs)  # type: ignore[union-attr]

    def _allgather(self, items: list[Ready]) -> None:
        sources = [source.contiguous() for each in items for source in each.submission.tensors]  # type: ignore[union-attr]
        rows = self._exchange.all_gather_numbers([source.shape[0] for source in sources])
        gathered = [
            self._gather_rows(source, [numbers[index] for numbers in rows]) for index, source in enumerate(sources)
        ]
        rest = iter(gathered)
        for each in items:
            _finish(each, list(itertools.islice(rest, len(each.signature.layouts))))

    def _gather_rows(self, source: torch.Tensor, rows: list[int]) -> torch.Tensor:
        output = source.new_empty((sum(rows), *source.shape[1:]))
        if min(rows) == max(rows):
            self._calls.all_gather(output, source)
        else:
            self._calls.all_gather_list(output.split(rows), source)
        return output

    def _alltoall(self, items: list[Ready]) -> None:
        # 1. the numbers of rows that this rank receives from every rank, for each operation
        sent = [each.submission.splits.tolist() for each in items]  # type: ignore[union-attr]
        received = self._exchange.all_to_all_numbers([list(column) for column in zip(*sent, strict=True)])
        # 2. the rows
        for index, each in enumerate(items):
            own = each.submission
            assert own is not None  # not supported with join
            (source,), counts = own.tensors, [numbers[index] for numbers in received]
            output = source.new_empty((sum(counts), *source.shape[1:]))
            rows = source.contiguous()[: sum(sent[index])]
            self._calls.all_to_all(output, rows, counts, sent[index])
            splits = own.splits
            _finish(each, [output, torch.tensor(counts, dtype=splits.dtype, device=splits.device)])  # type: ignore[union-attr]

    # -- without data ----------------------------------------------------------------------------------------------

    def _barrier(self, items: list[Ready]) -> None:
        for each in items:  # the negotiation was the barrier
            _finish(each, [])

    def _join(self, items: list[Ready]) -> None:
        for each in items:
            _finish(each, [each.last_joined])


def _finish(item: Ready, result: Sequence[Any] = (), error: Exception | None = None) -> None:
    if item.submission is not None:
        if item.submission.events:
            item.submission.events = gpu_order.record(result)
        item.submission.finish(result, error)


def _pairs(item: Ready) -> list[Pair]:
    """Return the inputs and outputs; zeros if this rank has joined."""
    if item.submission is None:
        zeros = [_zeros(layout) for layout in item.signature.layouts]
        return [Pair(each, each) for each in zeros]
    return [Pair(*each) for each in zip(item.submission.tensors, item.submission.outputs, strict=True)]


def _zeros(layout: Layout) -> torch.Tensor:
    return torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:  # an integer factor may be a fraction
        tensor.copy_(tensor.double().mul_(factor))
