"""The operations of a group: each describes its call as a `Collective`, and gives it to the executor."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpicomm import mpi
from mpicomm.backend import buffers, dtypes, mpi_calls, torch_internals
from mpicomm.backend.buffers import Tensors
from mpicomm.backend.collective import Collective, CollectiveStep
from mpicomm.backend.dense_collectives import DenseCollectives
from mpicomm.backend.executor import CallOptions, Executor
from mpicomm.backend.gpu_transport import Transport
from mpicomm.backend.monitored import MonitoredBarrier
from mpicomm.backend.reductions import Reduction
from mpicomm.backend.shm_selector import ShmSelector
from mpicomm.backend.staging import Use
from mpicomm.backend.work import CompletedWork, MessageWork
from mpicomm.settings import Settings
from mpicomm.watchdog import flight_recorder, rank_failures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


_READ = (Use(reads=True, writes=False),)
_WRITTEN = (Use(reads=False, writes=True),)
_IN_PLACE = (Use(reads=True, writes=True),)
_SPREAD_READ = (Use(reads=True, writes=False, is_spread=True),)
_SPREAD_WRITTEN = (Use(reads=False, writes=True, is_spread=True),)

_BUFFERED_BYTES = 2**12  # MPI may copy messages of this size, and completes them at once


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
        self.node = ShmSelector(comm, record, settings)
        self.dense = DenseCollectives(comm, self.node)
        self.executor = Executor(comm, record, settings, self.node.close)
        self._monitored = MonitoredBarrier(comm)

    # -- reductions ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, opts: CallOptions) -> Any:
        """All-reduce a tensor in place."""
        step = CollectiveStep(functools.partial(self.dense.all_reduce, reduction=reduction), (tensor,), _IN_PLACE)
        collective = Collective("all_reduce", [step], [tensor], [tensor], also=reduction.name)
        return self.executor.submit(collective, self.transport, opts)

    def all_reduce_coalesced(self, tensors: Tensors, reductions: Sequence[Reduction], opts: CallOptions) -> Any:
        """All-reduce each tensor in place."""
        steps = [
            CollectiveStep(functools.partial(self.dense.all_reduce, reduction=reduction), (tensor,), _IN_PLACE)
            for tensor, reduction in zip(tensors, reductions, strict=True)
        ]
        return self.executor.submit(
            Collective("all_reduce", steps, tensors, tensors, also=reductions[0].name), self.transport, opts
        )

    def all_reduce_sparse(self, tensor: torch.Tensor, reduction: Reduction, opts: CallOptions) -> Any:
        """Sum sparse (COO) tensors in place: every rank gathers all entries and adds those with equal indices."""
        # 1. this rank's entries
        entries = tensor.detach().cpu().coalesce()
        places = entries.indices().t().contiguous()  # (entries, sparse dimensions)
        values = reduction.load(entries.values(), keep=True)

        def run() -> None:
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

        step = CollectiveStep(run, (), (), num_blocks=None)
        collective = Collective("all_reduce", [step], [tensor], [tensor], also=f"{reduction.name} sparse")
        return self.executor.submit(collective, self.transport, opts)

    def _gather_rows(self, rows: torch.Tensor, found: Sequence[int]) -> torch.Tensor:
        """Return the rows of all ranks in rank order, `found[r]` of rank r."""
        result = torch.empty(sum(found), *rows.shape[1:], dtype=rows.dtype, device="cpu")
        result.split(list(found))[self.comm.rank].copy_(rows)
        mpi_calls.all_gather(self.comm, result, [count * math.prod(rows.shape[1:]) for count in found])
        return result

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction, opts: CallOptions) -> Any:
        """Reduce in place on `root`; the tensors of other ranks keep their content."""
        run = functools.partial(self.dense.reduce, reduction=reduction, root=root)
        step = CollectiveStep(run, (tensor,), _IN_PLACE if self.comm.rank == root else _READ)
        return self.executor.submit(
            Collective("reduce", [step], [tensor], [tensor], root, reduction.name), self.transport, opts
        )

    def reduce_scatter(
        self, outputs: Tensors, sources: Tensors, reductions: Sequence[Reduction], opts: CallOptions
    ) -> Any:
        """Reduce each source (group size times its output); each rank receives its block."""
        steps = [
            CollectiveStep(
                functools.partial(self.dense.reduce_scatter, reduction=reduction),
                pair,
                (*_WRITTEN, *_SPREAD_READ),
                self.comm.size,
            )
            for *pair, reduction in zip(outputs, sources, reductions, strict=True)
        ]
        return self.executor.submit(
            Collective("reduce_scatter", steps, outputs, sources, also=reductions[0].name), self.transport, opts
        )

    def reduce_scatter_list(
        self, output: torch.Tensor, sources: Tensors, reduction: Reduction, opts: CallOptions
    ) -> Any:
        """Reduce `sources[r]` of all ranks into rank r's output; sizes may differ between ranks."""
        counts = buffers.uneven_counts(sources)

        def run(output: torch.Tensor, *sources: torch.Tensor) -> None:
            self.dense.reduce_scatter(output, buffers.pack_all(sources), reduction, counts)

        step = CollectiveStep(
            run, (output, *sources), (*_WRITTEN, *_READ * len(sources)), None if counts else self.comm.size
        )
        return self.executor.submit(
            Collective("reduce_scatter", [step], [output], sources, also=reduction.name), self.transport, opts
        )

    # -- data movement -------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int, opts: CallOptions) -> Any:
        """Copy `root`'s tensor to all ranks."""
        run = functools.partial(self.dense.broadcast, root=root)
        step = CollectiveStep(run, (tensor,), _READ if self.comm.rank == root else _WRITTEN)
        return self.executor.submit(Collective("broadcast", [step], [tensor], [tensor], root), self.transport, opts)

    def all_gather(self, outputs: Tensors, sources: Tensors, opts: CallOptions) -> Any:
        """Gather each source of all ranks into its output (group size times the source), in rank order."""
        steps = [
            CollectiveStep(self.dense.all_gather, pair, (*_SPREAD_WRITTEN, *_READ), self.comm.size)
            for pair in zip(outputs, sources, strict=True)
        ]
        return self.executor.submit(Collective("all_gather", steps, outputs, sources), self.transport, opts)

    def all_gather_list(self, outputs: Sequence[Tensors], sources: Tensors, opts: CallOptions) -> Any:
        """Gather rank r's `sources[i]` into `outputs[i][r]`; sizes may differ between ranks."""
        steps = [
            CollectiveStep(
                lambda source, *targets: self.dense.all_gather_list(targets, source),
                (source, *targets),
                (*_READ, *_WRITTEN * len(targets)),
                None if buffers.uneven_counts(targets) else self.comm.size,
            )
            for targets, source in zip(outputs, sources, strict=True)
        ]
        results = [each for targets in outputs for each in targets]
        return self.executor.submit(
            Collective("all_gather", steps, results, results, inputs=sources), self.transport, opts
        )

    def gather(self, outputs: Tensors, source: torch.Tensor, root: int, opts: CallOptions) -> Any:
        """Gather rank r's `source` into `outputs[r]` on `root`; `outputs` is empty on other ranks."""

        def run(source: torch.Tensor, *outputs: torch.Tensor) -> None:
            self.dense.gather(outputs, source, root)

        step = CollectiveStep(run, (source, *outputs), (*_READ, *_WRITTEN * len(outputs)), None)
        return self.executor.submit(
            Collective("gather", [step], outputs, [source], root, any_size=True), self.transport, opts
        )

    def gather_single(self, outputs: Tensors, source: torch.Tensor, root: int, opts: CallOptions) -> Any:
        """Gather the sources into `outputs[0]` on `root`, in rank order; `outputs` is empty on other ranks."""

        def run(source: torch.Tensor, output: torch.Tensor | None = None) -> None:
            self.dense.gather_single(output, source, root)

        step = CollectiveStep(run, (source, *outputs), (*_READ, *_SPREAD_WRITTEN * len(outputs)), self.comm.size)
        return self.executor.submit(Collective("gather", [step], outputs, [source], root), self.transport, opts)

    def scatter(self, output: torch.Tensor, sources: Tensors, root: int, opts: CallOptions) -> Any:
        """Send `sources[r]` of `root` to rank r's `output`; `sources` is empty on other ranks."""

        def run(output: torch.Tensor, *sources: torch.Tensor) -> None:
            self.dense.scatter(output, sources, root)

        step = CollectiveStep(run, (output, *sources), (*_WRITTEN, *_READ * len(sources)), None)
        collective = Collective("scatter", [step], [output], [output], root, any_size=True, inputs=sources)
        return self.executor.submit(collective, self.transport, opts)

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
        run = functools.partial(self.dense.all_to_all, counts=counts, source_counts=source_counts)
        is_even = counts is None
        uses = (*_SPREAD_WRITTEN, *_SPREAD_READ) if is_even else (*_WRITTEN, *_READ)
        step = CollectiveStep(run, (output, source), uses, self.comm.size if is_even else None)
        also = "even" if is_even else "uneven"
        return self.executor.submit(
            Collective("all_to_all", [step], [output], [source], None, also, not is_even), self.transport, opts
        )

    def all_to_all_list(self, outputs: Tensors, sources: Tensors, opts: CallOptions) -> Any:
        """Send `sources[r]` to rank r and receive its tensor in `outputs[r]`."""

        def run(*tensors: torch.Tensor) -> None:
            self.dense.all_to_all_list(tensors[: self.comm.size], tensors[self.comm.size :])

        uses = (*_WRITTEN * len(outputs), *_READ * len(sources))
        step = CollectiveStep(run, (*outputs, *sources), uses, None)
        return self.executor.submit(
            Collective("all_to_all", [step], outputs, sources, None, "list", any_size=True), self.transport, opts
        )

    # -- barriers ------------------------------------------------------------------------------------------------

    def monitored_barrier(self, seconds: float, *, names_all: bool) -> None:
        """Wait for all ranks; the error on rank 0 lists the missing ranks, and the group stays usable."""
        operation = self.executor.note_own("monitored_barrier")
        try:
            self._monitored.wait(seconds, names_all=names_all)
        except RuntimeError as error:
            rank_failures.check(error)
            self.executor.keep_communicator()  # a late rank may still send a message that this rank no longer receives
            raise
        finally:
            operation.finish()

    def barrier(self, opts: CallOptions) -> Any:
        """Wait for all ranks, for at most the timeout in the options, or else the group's."""
        return self.executor.barrier(opts)

    # -- point-to-point ------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> MessageWork | CompletedWork:
        """Start sending; the work completes when the tensor may be modified again."""
        messages = self.executor.messages
        operation = messages.note("send", tensor, dst, tag)
        dense = self.transport.fetch(tensor)
        request = mpi_calls.send(self.comm, dense, dst, tag)
        if tensor.nbytes > _BUFFERED_BYTES or torch_internals.is_profiling() or not request.Test():
            return messages.track("send", MessageWork([tensor], request, dense, operation, messages))
        operation.finish()
        return CompletedWork.of([tensor])

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> MessageWork:
        """Start receiving from `src`, or from the first rank that sends if it is None."""
        messages = self.executor.messages
        operation = messages.note("recv", tensor, src, tag)
        dense, bring = self.transport.expect(tensor)

        def arrived(status: Any) -> None:
            if src is None:
                operation.peer = status.source
                operation.number_message(status.tag)
            _check_count(status, dense)
            with buffers.mode_of(tensor):
                bring()

        source = mpi.api().ANY_SOURCE if src is None else src
        request = mpi_calls.receive(self.comm, dense, source, tag)
        work = MessageWork([tensor], request, dense, operation, messages, arrived)
        return messages.track("recvAnySource" if src is None else "recv", work)  # torch's names


def _check_count(status: Any, dense: torch.Tensor) -> None:
    got = mpi_calls.received(status, dense.dtype)
    if got != dense.numel():
        raise RuntimeError(
            f"recv: expected {dense.numel()} elements of {dtypes.short(dense.dtype)} from rank {status.source} "
            f"(tag {status.tag}), got {got}.\nSend and receive tensors of the same size."
        )
