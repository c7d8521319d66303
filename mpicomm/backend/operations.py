"""The operations, once: each turns tensors into dense memory, and hands the executor what is to be called on it."""

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
# Of an output and an input:
_GATHERED = (*_SPREAD_WRITTEN, *_READ)
_SCATTERED = (*_WRITTEN, *_SPREAD_READ)
_EXCHANGED = (*_SPREAD_WRITTEN, *_SPREAD_READ)
_WHOLE = (*_WRITTEN, *_READ)


class Operations:
    """The operations of one group, on the group's own communicator.

    Arguments are taken as checked: dense or not, on host or GPU, but of the right number, shape and dtype. Operations
    of several tensors make one call of MPI for each.
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
        """Reduce in place, on all ranks."""
        call = self.transport.prepare(functools.partial(self._all_reduce, reduction), (tensor,), _IN_PLACE)
        return self.executor.launch("all_reduce", call, [tensor], opts, [tensor], also=reduction.name)

    def all_reduce_coalesced(self, tensors: Tensors, reductions: Sequence[Reduction], opts: CallOptions) -> Any:
        """Reduce each tensor in place, on all ranks."""
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
        if reduction.is_mpis_own and buffers.is_dense(tensor):
            return functools.partial(mpi_calls.all_reduce, self.comm, tensor, reduction.datatype, reduction.op)
        job = _Job(tensor, reduction, keep=False)

        def call() -> None:
            for piece, dense in job.loaded():
                mpi_calls.all_reduce(self.comm, dense, reduction.datatype, reduction.op)
                reduction.store(dense, piece)

        return call

    def all_reduce_sparse(self, tensor: torch.Tensor, reduction: Reduction, opts: CallOptions) -> Any:
        """Add up sparse tensors in place, on all ranks: everybody gathers all entries and adds those of one place."""
        entries = tensor.detach().cpu().coalesce()
        places = entries.indices().t().contiguous()  # (entries, sparse dimensions)
        values = reduction.load(entries.values(), keep=True)

        def call() -> None:
            found = self.comm.allgather(len(places))
            total = torch.sparse_coo_tensor(
                self._gather_rows(places, found).t(),
                self._gather_rows(values, found),
                tensor.shape,
                check_invariants=False,
            ).coalesce()
            sums = torch.empty_like(total.values(), dtype=tensor.dtype)
            reduction.store(total.values(), sums)
            with torch.no_grad():  # detach() gives a sparse tensor that has its own entries
                tensor.copy_(
                    torch.sparse_coo_tensor(
                        total.indices(), sums, tensor.shape, is_coalesced=True, check_invariants=False
                    )
                )
            buffers.settle(tensor)

        also = f"{reduction.name} sparse"
        return self.executor.launch("all_reduce", call, [tensor], opts, [tensor], also=also)

    def _gather_rows(self, rows: torch.Tensor, found: Sequence[int]) -> torch.Tensor:
        """Return everybody's rows, `found[r]` of rank r."""
        result = torch.empty(sum(found), *rows.shape[1:], dtype=rows.dtype, device="cpu")
        result.split(list(found))[self.comm.rank].copy_(rows)
        mpi_calls.all_gather(self.comm, result, [count * math.prod(rows.shape[1:]) for count in found])
        return result

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction, opts: CallOptions) -> Any:
        """Reduce in place on `root`; the others' tensors keep their content."""
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
        """Reduce each source (size times its output) and leave each rank its block."""
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
        result = _reduced_room(reduction, output, dense)

        def call() -> None:
            mpi_calls.reduce_scatter(self.comm, dense, counts, result, reduction.datatype, reduction.op)
            reduction.store(result, output)

        return call

    def reduce_scatter_list(
        self, output: torch.Tensor, sources: Tensors, reduction: Reduction, opts: CallOptions
    ) -> Any:
        """Reduce every rank's `sources[r]` into rank r's output; the sizes may differ from rank to rank."""
        counts = _uneven(sources)

        def make(output: torch.Tensor, *sources: torch.Tensor) -> Call:
            return self._reduce_scatter(reduction, counts, output, buffers.pack_all(sources))

        uses = [*_WRITTEN, *_READ * len(sources)]
        call = self.transport.prepare(make, (output, *sources), uses, num_blocks=None if counts else self.comm.size)
        return self.executor.launch("reduce_scatter", call, [output], opts, sources, also=reduction.name)

    # -- movement ------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int, opts: CallOptions) -> Any:
        """Copy `root`'s tensor into everybody's."""
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
        """Gather everybody's source into the output (size times the source), in the order of ranks; for each pair."""
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
        """Gather rank r's `sources[i]` into `outputs[i][r]`; the sizes may differ from rank to rank."""
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
        dense, flat, counts = buffers.pack(source), buffers.room_for_all(targets), _uneven(targets)

        def call() -> None:
            self._put(dense, flat, sum(buffers.counts(targets[: self.comm.rank])))
            mpi_calls.all_gather(self.comm, flat, counts)
            buffers.unpack_all(flat, targets)

        return call

    def _put(self, dense: torch.Tensor, result: torch.Tensor, start: int) -> None:
        """Copy this rank's part to its place, where it may be already, as FSDP has it."""
        mine = result.detach().view(-1).narrow(0, start, dense.numel())
        if mine.data_ptr() != dense.data_ptr():
            mine.copy_(dense.detach().view(-1))

    def gather(self, outputs: Tensors, source: torch.Tensor, root: int, opts: CallOptions) -> Any:
        """Gather rank r's `source` into `outputs[r]` on `root`; `outputs` is empty elsewhere."""

        def make(source: torch.Tensor, *outputs: torch.Tensor) -> Call:
            flat, counts = (buffers.room_for_all(outputs), buffers.counts(outputs)) if outputs else (None, [])
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
        """Gather everybody's source into `outputs[0]` on `root`, by rank; `outputs` is empty elsewhere."""

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
        """Send `sources[r]` of `root` to rank r's `output`; `sources` is empty elsewhere."""

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
        """Send rank r its `source_counts[r]` elements of `source`; `output` takes `counts[r]` elements from rank r.

        Args:
            counts: None, as `source_counts`, on all ranks or on none, if all blocks of all ranks are equally long.
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
        """Send `sources[r]` to rank r, and receive what rank r sends into `outputs[r]`."""

        def make(*tensors: torch.Tensor) -> Call:
            outputs, sources = tensors[: self.comm.size], tensors[self.comm.size :]
            flat = buffers.room_for_all(outputs)
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
        """Wait for every rank; rank 0 names those that do not come, and the group stays usable."""
        operation = self.executor.note_own("monitored_barrier")
        try:
            self._monitored.wait(seconds, names_all=names_all)
        except RuntimeError:
            self.executor.keep_communicator()  # a rank may still send what this one stopped waiting for
            raise
        finally:
            operation.finish()

    def barrier(self, opts: CallOptions) -> Any:
        """Wait for every rank, for at most the options' timeout, or the group's."""
        return self.executor.barrier(opts)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> MessageWork:
        """Start sending; the work is done when the tensor may be written again."""
        operation = self.executor.note_message("send", tensor, dst)
        dense = self.transport.fetch(tensor)
        request = mpi_calls.send(self.comm, dense, dst, tag)
        return self.executor.track("send", MessageWork([tensor], request, dense, operation, self.executor))

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> MessageWork:
        """Start receiving from `src`, or from whoever sends first if it is None."""
        operation = self.executor.note_message("recv", tensor, src)
        dense, bring = self.transport.expect(tensor)

        def arrived(status: Any) -> None:
            _check_count(status, dense)
            with buffers.mode_of(tensor):
                bring()

        source = mpi.api().ANY_SOURCE if src is None else src
        request = mpi_calls.receive(self.comm, dense, source, tag)
        work = MessageWork([tensor], request, dense, operation, self.executor, arrived)
        return self.executor.track("recvAnySource" if src is None else "recv", work)  # as torch calls it


def _joint(calls: Sequence[Call]) -> Call:
    """Return what makes all calls, one after the other."""
    if len(calls) == 1:
        return calls[0]

    def call() -> None:
        for each in calls:
            each()

    return call


class _Job:
    """A tensor that is reduced in place: loaded by the caller, or piece by piece where it is large."""

    __slots__ = ("_dense", "_keep", "_packed", "_pieces", "_tensor", "reduction")

    def __init__(self, tensor: torch.Tensor, reduction: Reduction, *, keep: bool) -> None:
        self.reduction = reduction
        self._keep = keep
        self._tensor = tensor
        self._packed = buffers.pack(tensor) if reduction.is_cut(tensor) else tensor
        self._pieces = reduction.pieces(self._packed)
        self._dense = reduction.load(tensor, keep=keep) if len(self._pieces) == 1 else None

    def loaded(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Give each piece and its dense memory; the next is loaded when this one is done."""
        if self._dense is not None:
            yield self._pieces[0], self._dense
            return
        for piece in self._pieces:
            yield piece, self.reduction.load(piece, keep=self._keep)
        if not self._keep:
            buffers.unpack(self._packed, self._tensor)


def _reduced_room(reduction: Reduction, output: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """Return memory for a reduced block; the output may be this rank's block of the input, which MPI forbids."""
    result = reduction.output_buffer(output)
    return torch.empty_like(result) if buffers.overlap(dense, result) else result


def _uneven(tensors: Tensors) -> list[int] | None:
    """Return the tensors' sizes; None if they are all equal, for which MPI has simpler calls."""
    counts = buffers.counts(tensors)
    return None if all(count == counts[0] for count in counts) else counts


def _check_count(status: Any, dense: torch.Tensor) -> None:
    got = mpi_calls.received(status, dense.dtype)
    if got != dense.numel():
        raise RuntimeError(
            f"recv: expected {dense.numel()} elements of {dtypes.short(dense.dtype)} from rank {status.source} "
            f"(tag {status.tag}), got {got}.\nSend and receive tensors of the same size."
        )
