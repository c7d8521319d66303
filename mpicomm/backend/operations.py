"""The operations of a group: each one packs tensors into dense memory and passes the executor the call on it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpicomm import mpi
from mpicomm.backend import buffers, dtypes, mpi_calls
from mpicomm.backend.buffers import Tensors
from mpicomm.backend.executor import CallOptions, Executor
from mpicomm.backend.gpu_transport import Transport
from mpicomm.backend.monitored import MonitoredBarrier
from mpicomm.backend.reductions import Reduction
from mpicomm.backend.shm_selector import ShmSelector
from mpicomm.backend.staging import Call, Use
from mpicomm.backend.work import MessageWork
from mpicomm.settings import Settings
from mpicomm.watchdog import flight_recorder

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


_READ = (Use(reads=True, writes=False),)
_WRITTEN = (Use(reads=False, writes=True),)
_IN_PLACE = (Use(reads=True, writes=True),)
_SPREAD_READ = (Use(reads=True, writes=False, is_spread=True),)
_SPREAD_WRITTEN = (Use(reads=False, writes=True, is_spread=True),)
# For an output and an input:
_GATHERED = (*_SPREAD_WRITTEN, *_READ)
_SCATTERED = (*_WRITTEN, *_SPREAD_READ)
_EXCHANGED = (*_SPREAD_WRITTEN, *_SPREAD_READ)
_WHOLE = (*_WRITTEN, *_READ)


class Operations:
    """The operations of one group, on the group's own communicator.

    The caller has checked the arguments: number, shape and dtype are correct; tensors may be non-contiguous, and on the
    host or a GPU. Operations on several tensors make one MPI call for each.
    """

    def __init__(
        self, comm: Intracomm, record: flight_recorder.Group, settings: Settings, transport: Transport
    ) -> None:
        self.comm = comm
        self.record = record
        self.transport = transport
        self.node = ShmSelector(comm, record, is_wanted=settings.shares_memory)
        self.executor = Executor(comm, record, settings, self.node.close)
        self._monitored = MonitoredBarrier(comm)

    # -- reductions ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, opts: CallOptions) -> Any:
        """All-reduce a tensor in place."""
        call = self.transport.prepare(functools.partial(self._all_reduce, reduction), (tensor,), _IN_PLACE)
        return self.executor.launch("all_reduce", call, [tensor], opts, [tensor], also=reduction.name)

    def all_reduce_coalesced(self, tensors: Tensors, reductions: Sequence[Reduction], opts: CallOptions) -> Any:
        """All-reduce each tensor in place."""
        calls = [
            self.transport.prepare(functools.partial(self._all_reduce, reduction), (tensor,), _IN_PLACE)
            for tensor, reduction in zip(tensors, reductions, strict=True)
        ]
        return self.executor.launch("all_reduce", _joint(calls), tensors, opts, tensors, also=reductions[0].name)

    def _all_reduce(self, reduction: Reduction, tensor: torch.Tensor) -> Call:
        if not self.node.may_reduce("all_reduce", tensor, reduction):
            return self._all_reduce_by_mpi(reduction, tensor)
        dense = buffers.pack(tensor)

        def call() -> None:
            if self.node.all_reduce(dense, reduction):
                buffers.unpack(dense, tensor)
            else:
                self._all_reduce_by_mpi(reduction, tensor)()

        return call

    def _all_reduce_by_mpi(self, reduction: Reduction, tensor: torch.Tensor) -> Call:
        if reduction.is_native and buffers.is_dense(tensor):
            return functools.partial(mpi_calls.all_reduce, self.comm, tensor, reduction.datatype, reduction.op)
        job = _Job(tensor, reduction, keep=False)

        def call() -> None:
            for piece, dense in job.loaded():
                mpi_calls.all_reduce(self.comm, dense, reduction.datatype, reduction.op)
                reduction.store(dense, piece)

        return call

    def all_reduce_sparse(self, tensor: torch.Tensor, reduction: Reduction, opts: CallOptions) -> Any:
        """Sum sparse (COO) tensors in place: every rank gathers all entries and adds those with equal indices."""
        # 1. this rank's entries
        entries = tensor.detach().cpu().coalesce()
        places = entries.indices().t().contiguous()  # (entries, sparse dimensions)
        values = reduction.load(entries.values(), keep=True)

        def call() -> None:
            # 2. gather the entries of all ranks; coalesce() adds those with equal indices
            found = self.comm.allgather(len(places))
            total = torch.sparse_coo_tensor(
                self._gather_rows(places, found).t(),
                self._gather_rows(values, found),
                tensor.shape,
                check_invariants=False,
            ).coalesce()
            # 3. divide and round, then write the result to the caller's tensor
            sums = torch.empty_like(total.values(), dtype=tensor.dtype)
            reduction.store(total.values(), sums)
            with torch.no_grad():  # not detach(), which returns a sparse tensor with its own entries
                tensor.copy_(
                    torch.sparse_coo_tensor(
                        total.indices(), sums, tensor.shape, is_coalesced=True, check_invariants=False
                    )
                )
            buffers.settle(tensor)

        also = f"{reduction.name} sparse"
        return self.executor.launch("all_reduce", call, [tensor], opts, [tensor], also=also)

    def _gather_rows(self, rows: torch.Tensor, found: Sequence[int]) -> torch.Tensor:
        """Return the rows of all ranks in rank order, `found[r]` of rank r."""
        result = torch.empty(sum(found), *rows.shape[1:], dtype=rows.dtype, device="cpu")
        result.split(list(found))[self.comm.rank].copy_(rows)
        mpi_calls.all_gather(self.comm, result, [count * math.prod(rows.shape[1:]) for count in found])
        return result

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction, opts: CallOptions) -> Any:
        """Reduce in place on `root`; the tensors of other ranks keep their content."""
        make = functools.partial(self._reduce, reduction, root)
        call = self.transport.prepare(make, (tensor,), _IN_PLACE if self.comm.rank == root else _READ)
        return self.executor.launch("reduce", call, [tensor], opts, [tensor], root=root, also=reduction.name)

    def _reduce(self, reduction: Reduction, root: int, tensor: torch.Tensor) -> Call:
        if not self.node.may_reduce("reduce", tensor, reduction):
            return self._reduce_by_mpi(reduction, root, tensor)
        dense = buffers.pack(tensor)

        def call() -> None:
            if not self.node.reduce(dense, reduction, root):
                self._reduce_by_mpi(reduction, root, tensor)()
            elif self.comm.rank == root:
                buffers.unpack(dense, tensor)

        return call

    def _reduce_by_mpi(self, reduction: Reduction, root: int, tensor: torch.Tensor) -> Call:
        is_root = self.comm.rank == root
        job = _Job(tensor, reduction, keep=not is_root)

        def call() -> None:
            for piece, dense in job.loaded():
                mpi_calls.reduce(self.comm, dense, reduction.datatype, reduction.op, root)
                if is_root:
                    reduction.store(dense, piece)

        return call

    def reduce_scatter(
        self, outputs: Tensors, sources: Tensors, reductions: Sequence[Reduction], opts: CallOptions
    ) -> Any:
        """Reduce each source (group size times its output); each rank receives its block."""
        calls = [
            self.transport.prepare(
                functools.partial(self._reduce_scatter, reduction, None), pair, _SCATTERED, num_blocks=self.comm.size
            )
            for *pair, reduction in zip(outputs, sources, reductions, strict=True)
        ]
        return self.executor.launch("reduce_scatter", _joint(calls), outputs, opts, sources, also=reductions[0].name)

    def _reduce_scatter(
        self, reduction: Reduction, counts: Sequence[int] | None, output: torch.Tensor, source: torch.Tensor
    ) -> Call:
        if counts is not None or not self.node.may_reduce("reduce_scatter", source, reduction):
            return self._reduce_scatter_by_mpi(reduction, counts, output, source)
        dense, result = buffers.pack(source), buffers.output_buffer(output)
        result = buffers.without_alias(result, dense)

        def call() -> None:
            if self.node.reduce_scatter(dense, result, reduction):
                buffers.unpack(result, output)
            else:
                self._reduce_scatter_by_mpi(reduction, counts, output, source)()

        return call

    def _reduce_scatter_by_mpi(
        self, reduction: Reduction, counts: Sequence[int] | None, output: torch.Tensor, source: torch.Tensor
    ) -> Call:
        dense = reduction.load(source, keep=True)
        result = _reduced_output_buffer(reduction, output, dense)

        def call() -> None:
            mpi_calls.reduce_scatter(self.comm, dense, counts, result, reduction.datatype, reduction.op)
            reduction.store(result, output)

        return call

    def reduce_scatter_list(
        self, output: torch.Tensor, sources: Tensors, reduction: Reduction, opts: CallOptions
    ) -> Any:
        """Reduce `sources[r]` of all ranks into rank r's output; sizes may differ between ranks."""
        counts = _uneven(sources)

        def make(output: torch.Tensor, *sources: torch.Tensor) -> Call:
            return self._reduce_scatter(reduction, counts, output, buffers.pack_all(sources))

        uses = [*_WRITTEN, *_READ * len(sources)]
        call = self.transport.prepare(make, (output, *sources), uses, num_blocks=None if counts else self.comm.size)
        return self.executor.launch("reduce_scatter", call, [output], opts, sources, also=reduction.name)

    # -- data movement -------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int, opts: CallOptions) -> Any:
        """Copy `root`'s tensor to all ranks."""
        is_root = self.comm.rank == root
        make = self._broadcast_mine if is_root else functools.partial(self._receive_broadcast, root)
        call = self.transport.prepare(make, (tensor,), _READ if is_root else _WRITTEN)
        return self.executor.launch("broadcast", call, [tensor], opts, [tensor], root=root)

    def _broadcast_mine(self, tensor: torch.Tensor) -> Call:
        return functools.partial(self._broadcast, buffers.pack(tensor), self.comm.rank)

    def _receive_broadcast(self, root: int, tensor: torch.Tensor) -> Call:
        dense = buffers.output_buffer(tensor)

        def call() -> None:
            self._broadcast(dense, root)
            buffers.unpack(dense, tensor)

        return call

    def _broadcast(self, dense: torch.Tensor, root: int) -> None:
        if not (self.node.may_take("broadcast", dense) and self.node.broadcast(dense, root)):
            mpi_calls.broadcast(self.comm, dense, root)

    def all_gather(self, outputs: Tensors, sources: Tensors, opts: CallOptions) -> Any:
        """Gather each source of all ranks into its output (group size times the source), in rank order."""
        calls = [
            self.transport.prepare(self._all_gather, pair, _GATHERED, num_blocks=self.comm.size)
            for pair in zip(outputs, sources, strict=True)
        ]
        return self.executor.launch("all_gather", _joint(calls), outputs, opts, sources)

    def _all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Call:
        dense, result = buffers.pack(source), buffers.output_buffer(output)

        def call() -> None:
            self._put(dense, result, self.comm.rank * dense.numel())
            if not (self.node.may_take("all_gather", result) and self.node.all_gather(result)):
                mpi_calls.all_gather(self.comm, result, None)
            buffers.unpack(result, output)

        return call

    def all_gather_list(self, outputs: Sequence[Tensors], sources: Tensors, opts: CallOptions) -> Any:
        """Gather rank r's `sources[i]` into `outputs[i][r]`; sizes may differ between ranks."""
        calls = [
            self.transport.prepare(
                self._all_gather_list,
                (source, *targets),
                [*_READ, *_WRITTEN * len(targets)],
                num_blocks=None if _uneven(targets) else self.comm.size,
            )
            for targets, source in zip(outputs, sources, strict=True)
        ]
        results = [each for targets in outputs for each in targets]
        return self.executor.launch("all_gather", _joint(calls), results, opts, results, inputs=sources)

    def _all_gather_list(self, source: torch.Tensor, *targets: torch.Tensor) -> Call:
        dense, flat, counts = buffers.pack(source), buffers.output_buffer_of_all(targets), _uneven(targets)

        def call() -> None:
            self._put(dense, flat, sum(buffers.counts(targets[: self.comm.rank])))
            mpi_calls.all_gather(self.comm, flat, counts)
            buffers.unpack_all(flat, targets)

        return call

    def _put(self, dense: torch.Tensor, result: torch.Tensor, start: int) -> None:
        """Copy this rank's part to its place in `result`, unless it is there already, as in FSDP."""
        mine = result.detach().view(-1).narrow(0, start, dense.numel())
        if mine.data_ptr() != dense.data_ptr():
            mine.copy_(dense.detach().view(-1))

    def gather(self, outputs: Tensors, source: torch.Tensor, root: int, opts: CallOptions) -> Any:
        """Gather rank r's `source` into `outputs[r]` on `root`; `outputs` is empty on other ranks."""

        def make(source: torch.Tensor, *outputs: torch.Tensor) -> Call:
            flat, counts = (buffers.output_buffer_of_all(outputs), buffers.counts(outputs)) if outputs else (None, [])
            dense = buffers.without_alias(buffers.pack(source), flat)

            def call() -> None:
                mpi_calls.gather(self.comm, dense, flat, counts, root)
                if flat is not None:
                    buffers.unpack_all(flat, outputs)

            return call

        uses = [*_READ, *_WRITTEN * len(outputs)]
        call = self.transport.prepare(make, (source, *outputs), uses, num_blocks=None)
        return self.executor.launch("gather", call, outputs, opts, [source], root=root, any_size=True)

    def gather_single(self, outputs: Tensors, source: torch.Tensor, root: int, opts: CallOptions) -> Any:
        """Gather the sources into `outputs[0]` on `root`, in rank order; `outputs` is empty on other ranks."""

        def make(source: torch.Tensor, *outputs: torch.Tensor) -> Call:
            result = buffers.output_buffer(outputs[0]) if outputs else None
            dense = buffers.without_alias(buffers.pack(source), result)
            counts = [dense.numel()] * self.comm.size

            def call() -> None:
                mpi_calls.gather(self.comm, dense, result, counts, root)
                if result is not None:
                    buffers.unpack(result, outputs[0])

            return call

        uses = [*_READ, *_SPREAD_WRITTEN * len(outputs)]
        call = self.transport.prepare(make, (source, *outputs), uses, num_blocks=self.comm.size)
        return self.executor.launch("gather", call, outputs, opts, [source], root=root)

    def scatter(self, output: torch.Tensor, sources: Tensors, root: int, opts: CallOptions) -> Any:
        """Send `sources[r]` of `root` to rank r's `output`; `sources` is empty on other ranks."""

        def make(output: torch.Tensor, *sources: torch.Tensor) -> Call:
            result = buffers.output_buffer(output)
            flat = buffers.without_alias(buffers.pack_all(sources), result) if sources else None
            counts = buffers.counts(sources)

            def call() -> None:
                mpi_calls.scatter(self.comm, flat, counts, result, root)
                buffers.unpack(result, output)

            return call

        uses = [*_WRITTEN, *_READ * len(sources)]
        call = self.transport.prepare(make, (output, *sources), uses, num_blocks=None)
        return self.executor.launch("scatter", call, [output], opts, [output], root=root, any_size=True, inputs=sources)

    def all_to_all(
        self,
        output: torch.Tensor,
        counts: Sequence[int] | None,
        source: torch.Tensor,
        source_counts: Sequence[int] | None,
        opts: CallOptions,
    ) -> Any:
        """Send `source_counts[r]` elements of `source` to rank r; receive `counts[r]` elements from it in `output`.

        Args:
            counts: None, like `source_counts`, if all blocks of all ranks have the same size; then None on all ranks.
        """

        def make(output: torch.Tensor, source: torch.Tensor) -> Call:
            result = buffers.output_buffer(output)
            dense = buffers.without_alias(buffers.pack(source), result)

            def call() -> None:
                mpi_calls.all_to_all(self.comm, dense, source_counts, result, counts)
                buffers.unpack(result, output)

            return call

        is_even = counts is None
        also = "even" if is_even else "uneven"
        call = self.transport.prepare(
            make, (output, source), _EXCHANGED if is_even else _WHOLE, num_blocks=self.comm.size if is_even else None
        )
        return self.executor.launch("all_to_all", call, [output], opts, [source], also=also, any_size=not is_even)

    def all_to_all_list(self, outputs: Tensors, sources: Tensors, opts: CallOptions) -> Any:
        """Send `sources[r]` to rank r and receive its tensor in `outputs[r]`."""

        def make(*tensors: torch.Tensor) -> Call:
            outputs, sources = tensors[: self.comm.size], tensors[self.comm.size :]
            flat = buffers.output_buffer_of_all(outputs)
            dense = buffers.without_alias(buffers.pack_all(sources), flat)
            counts, source_counts = buffers.counts(outputs), buffers.counts(sources)

            def call() -> None:
                mpi_calls.all_to_all(self.comm, dense, source_counts, flat, counts)
                buffers.unpack_all(flat, outputs)

            return call

        uses = [*_WRITTEN * len(outputs), *_READ * len(sources)]
        call = self.transport.prepare(make, (*outputs, *sources), uses, num_blocks=None)
        return self.executor.launch("all_to_all", call, outputs, opts, sources, also="list", any_size=True)

    def monitored_barrier(self, seconds: float, *, names_all: bool) -> None:
        """Wait for all ranks; the error on rank 0 lists the missing ranks, and the group stays usable."""
        operation = self.executor.note_own("monitored_barrier")
        try:
            self._monitored.wait(seconds, names_all=names_all)
        except RuntimeError:
            self.executor.keep_communicator()  # a late rank may still send a message that this rank no longer receives
            raise
        finally:
            operation.finish()

    def barrier(self, opts: CallOptions) -> Any:
        """Wait for all ranks, for at most the timeout in the options, or else the group's."""
        return self.executor.barrier(opts)

    # -- point-to-point ------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> MessageWork:
        """Start sending; the work completes when the tensor may be modified again."""
        operation = self.executor.note_message("send", tensor, dst)
        dense = self.transport.fetch(tensor)
        request = mpi_calls.send(self.comm, dense, dst, tag)
        return self.executor.track("send", MessageWork([tensor], request, dense, operation, self.executor))

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> MessageWork:
        """Start receiving from `src`, or from the first rank that sends if it is None."""
        operation = self.executor.note_message("recv", tensor, src)
        dense, bring = self.transport.expect(tensor)

        def arrived(status: Any) -> None:
            _check_count(status, dense)
            with buffers.mode_of(tensor):
                bring()

        source = mpi.api().ANY_SOURCE if src is None else src
        request = mpi_calls.receive(self.comm, dense, source, tag)
        work = MessageWork([tensor], request, dense, operation, self.executor, arrived)
        return self.executor.track("recvAnySource" if src is None else "recv", work)  # torch's names


def _joint(calls: Sequence[Call]) -> Call:
    """Return one call that runs all calls in order."""
    if len(calls) == 1:
        return calls[0]

    def call() -> None:
        for each in calls:
            each()

    return call


class _Job:
    """A tensor to reduce in place: loaded on the caller's thread, or piece by piece during the call if it is large."""

    __slots__ = ("_dense", "_keep", "_packed", "_pieces", "_tensor", "reduction")

    def __init__(self, tensor: torch.Tensor, reduction: Reduction, *, keep: bool) -> None:
        self.reduction = reduction
        self._keep = keep
        self._tensor = tensor
        self._packed = buffers.pack(tensor) if reduction.is_cut(tensor) else tensor
        self._pieces = reduction.pieces(self._packed)
        self._dense = reduction.load(tensor, keep=keep) if len(self._pieces) == 1 else None

    def loaded(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each piece with its dense memory; a piece is loaded when the one before it is done."""
        if self._dense is not None:
            yield self._pieces[0], self._dense
            return
        for piece in self._pieces:
            yield piece, self.reduction.load(piece, keep=self._keep)
        if not self._keep:
            buffers.unpack(self._packed, self._tensor)


def _reduced_output_buffer(reduction: Reduction, output: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """Return memory for a reduced block; the output may overlap this rank's block of the input, which MPI forbids."""
    result = reduction.output_buffer(output)
    return torch.empty_like(result) if buffers.overlap(dense, result) else result


def _uneven(tensors: Tensors) -> list[int] | None:
    """Return the tensors' sizes, or None if all are equal: MPI has simpler calls for these."""
    counts = buffers.counts(tensors)
    return None if all(count == counts[0] for count in counts) else counts


def _check_count(status: Any, dense: torch.Tensor) -> None:
    got = mpi_calls.received(status, dense.dtype)
    if got != dense.numel():
        raise RuntimeError(
            f"recv: expected {dense.numel()} elements of {dtypes.short(dense.dtype)} from rank {status.source} "
            f"(tag {status.tag}), got {got}.\nSend and receive tensors of the same size."
        )
