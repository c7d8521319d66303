"""The collectives, once: each turns tensors into buffers and makes one MPI call.

Who runs the call: a synchronous operation is one blocking call on the caller's
thread; an asynchronous one is queued for the group's worker, and from then on later operations queue behind it until
the worker is idle again, so that every rank's calls keep the order in which they were made.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpicomm import mpi
from mpicomm.backend import buffers, dtypes
from mpicomm.backend.progress import Poller, Worker
from mpicomm.backend.reductions import Reduction
from mpicomm.backend.work import CompletedWork, MessageWork, QueuedWork
from mpicomm.errors import MpicommError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_REAP_ABOVE = 32  # messages in flight, above which the finished ones are looked for
_LAST_MESSAGES_SECONDS = 1.0

_abandoned: list[MessageWork] = []
"""Messages of destroyed groups: MPI may still read and write their memory."""

Tensors = Sequence[torch.Tensor]


class Engine:
    """The operations of one group, on the group's own communicator.

    Arguments are taken as checked: dense or not, on host or GPU, but of the right number, shape and dtype.
    """

    def __init__(self, comm: Intracomm, name: str) -> None:
        self.comm = comm
        self.name = name
        self._turn = threading.Lock()  # MPI wants collective calls on one communicator one at a time
        self._starting = threading.Lock()
        self._worker: Worker | None = None
        self._poller: Poller | None = None
        self._in_flight: set[MessageWork] = set()
        self._reap_at = _REAP_ABOVE
        self._is_open = True

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensors: Tensors, reductions: Sequence[Reduction], is_async: bool) -> Any:
        """Reduce each tensor in place, on all ranks."""
        memory = [reduction.load(tensor, keep=False) for tensor, reduction in zip(tensors, reductions, strict=True)]

        def call() -> None:
            for tensor, reduction, dense in zip(tensors, reductions, memory, strict=True):
                self.comm.Allreduce(mpi.api().IN_PLACE, reduction.spec(dense), reduction.op)
                reduction.store(dense, tensor)

        return self.launch(call, list(tensors), is_async)

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction, is_async: bool) -> Any:
        """Reduce in place on `root`; the others' tensors keep their content."""
        is_root = self.comm.rank == root
        dense = reduction.load(tensor, keep=not is_root)

        def call() -> None:
            mine = reduction.spec(dense)
            if is_root:
                self.comm.Reduce(mpi.api().IN_PLACE, mine, reduction.op, root)
                reduction.store(dense, tensor)
            else:
                self.comm.Reduce(mine, None, reduction.op, root)

        return self.launch(call, [tensor], is_async)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, reduction: Reduction, is_async: bool) -> Any:
        """Reduce `source` (size times the output) and leave each rank its block."""
        dense, result = reduction.load(source, keep=True), reduction.room(output)
        if buffers.overlap(dense, result):  # the output may be this rank's block of the input; MPI forbids it
            result = torch.empty_like(result, device="cpu")

        def call() -> None:
            blocks = buffers.blocks_spec(dense, self.comm.size, reduction.datatype)
            self.comm.Reduce_scatter_block(blocks, reduction.spec(result), reduction.op)
            reduction.store(result, output)

        return self.launch(call, [output], is_async)

    def broadcast(self, tensor: torch.Tensor, root: int, is_async: bool) -> Any:
        """Copy `root`'s tensor into everybody's."""
        is_root = self.comm.rank == root
        dense = buffers.pack(tensor) if is_root else buffers.room(tensor)

        def call() -> None:
            self.comm.Bcast(buffers.spec(dense), root)
            if not is_root:
                buffers.unpack(dense, tensor)

        return self.launch(call, [tensor], is_async)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, is_async: bool) -> Any:
        """Gather everybody's `source` into `output` (size times the source), in the order of ranks."""
        dense, result = buffers.pack(source), buffers.room(output)
        mine = result.detach().view(-1).narrow(0, self.comm.rank * dense.numel(), dense.numel())

        def call() -> None:
            # The input may be this rank's block of the output, as FSDP has it. MPI forbids that unless it is told so.
            if mine.data_ptr() != dense.data_ptr():
                mine.copy_(dense.detach().view(-1))
            self.comm.Allgather(mpi.api().IN_PLACE, buffers.blocks_spec(result, self.comm.size))
            buffers.unpack(result, output)

        return self.launch(call, [output], is_async)

    def all_gather_list(self, outputs: Tensors, source: torch.Tensor, is_async: bool) -> Any:
        """Gather rank r's `source` into `outputs[r]`; the sizes may differ from rank to rank."""
        dense, flat, counts = buffers.pack(source), _flat_for(outputs), _counts(outputs)

        def call() -> None:
            self.comm.Allgatherv(buffers.spec(dense), buffers.vector_spec(flat, counts))
            _unflatten(flat, outputs)

        return self.launch(call, list(outputs), is_async)

    def gather(self, outputs: Tensors, source: torch.Tensor, root: int, is_async: bool) -> Any:
        """Gather rank r's `source` into `outputs[r]` on `root`; `outputs` is empty elsewhere."""
        dense = buffers.pack(source)
        flat, counts = (_flat_for(outputs), _counts(outputs)) if outputs else (None, [])

        def call() -> None:
            if flat is None:
                self.comm.Gatherv(buffers.spec(dense), None, root)
            else:
                self.comm.Gatherv(buffers.spec(dense), buffers.vector_spec(flat, counts), root)
                _unflatten(flat, outputs)

        return self.launch(call, list(outputs), is_async)

    def scatter(self, output: torch.Tensor, sources: Tensors, root: int, is_async: bool) -> Any:
        """Send `sources[r]` of `root` to rank r's `output`; `sources` is empty elsewhere."""
        result = buffers.room(output)
        flat = _flatten(sources) if sources else None
        counts = _counts(sources)

        def call() -> None:
            mine = None if flat is None else buffers.vector_spec(flat, counts)
            self.comm.Scatterv(mine, buffers.spec(result), root)
            buffers.unpack(result, output)

        return self.launch(call, [output], is_async)

    def barrier(self, is_async: bool) -> Any:
        """Wait for every rank."""
        return self.launch(self.comm.Barrier, [], is_async)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> MessageWork:
        """Start sending; the work is done when the tensor may be written again."""
        self._check_open()
        dense = buffers.pack(tensor)
        request = self.comm.Isend(buffers.spec(dense), dst, tag)
        return self._track(MessageWork([tensor], request, dense, self))

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> MessageWork:
        """Start receiving from `src`, or from whoever sends first if it is None."""
        self._check_open()
        dense = buffers.room(tensor)

        def arrived(status: Any) -> None:
            _check_count(status, dense)
            buffers.unpack(dense, tensor)

        source = mpi.api().ANY_SOURCE if src is None else src
        request = self.comm.Irecv(buffers.spec(dense), source, tag)
        return self._track(MessageWork([tensor], request, dense, self, arrived))

    def watch(self, work: MessageWork) -> None:
        """Finish a message whose future somebody holds when it is through."""
        self._get_poller().watch(work)

    def forget(self, work: MessageWork) -> None:
        """Let go of a message that is through."""
        self._in_flight.discard(work)

    # -- who runs it ---------------------------------------------------------------------------------------------

    def launch(self, call: Callable[[], None], tensors: list[torch.Tensor], is_async: bool) -> Any:
        """Run `call` now, or queue it behind what is queued.

        Returns:
            The work; finished already if the operation is synchronous.
        """
        self._check_open()
        if self._runs_here(is_async):
            self._in_turn(call)
            return CompletedWork(tensors)
        work = QueuedWork(tensors)
        self._get_worker().submit(lambda: self._in_turn(call), work)
        if not is_async:
            work.wait()
        return work

    def close(self) -> None:
        """Finish what is queued, end the threads and free the communicator (collective)."""
        if not self._is_open:
            return
        self._is_open = False
        if self._worker is not None:
            self._worker.stop()
        if self._poller is not None:
            self._poller.stop()
        self._finish_messages()
        self.comm.Free()

    def _runs_here(self, is_async: bool) -> bool:
        worker = self._worker
        if worker is not None and worker.is_current_thread:
            return True  # a callback that queued an operation and waited for it would wait for itself
        return not is_async and (worker is None or worker.is_idle)

    def _check_open(self) -> None:
        if not self._is_open:
            raise MpicommError(f"group {self.name} is destroyed.\nMake a new one with torch.distributed.new_group().")

    def _in_turn(self, call: Callable[[], None]) -> None:
        with self._turn:
            call()

    def _get_worker(self) -> Worker:
        with self._starting:
            if self._worker is None:
                _require_threads()
                self._worker = Worker(f"mpicomm-worker-{self.name}")
            return self._worker

    def _get_poller(self) -> Poller:
        with self._starting:
            if self._poller is None:
                _require_threads()
                self._poller = Poller(f"mpicomm-poller-{self.name}")
            return self._poller

    def _track(self, work: MessageWork) -> MessageWork:
        """Keep a message's memory alive until it is through, whatever the caller does with the handle."""
        if len(self._in_flight) >= self._reap_at:
            self._reap()
            self._reap_at = max(_REAP_ABOVE, 2 * len(self._in_flight))
        self._in_flight.add(work)
        return work

    def _reap(self) -> None:
        for work in list(self._in_flight):
            work.is_completed()  # one that is through makes the engine forget it

    def _finish_messages(self) -> None:
        def all_through() -> bool:
            self._reap()
            return not self._in_flight

        if not mpi.poll(all_through, _LAST_MESSAGES_SECONDS, longest_pause=1e-4):
            warnings.warn(
                f"group {self.name} is destroyed with {len(self._in_flight)} messages on their way; "
                f"wait for what isend and irecv return before.",
                stacklevel=4,
            )
            _abandoned.extend(self._in_flight)


def _counts(tensors: Tensors) -> list[int]:
    return [each.numel() for each in tensors]


def _flat_for(tensors: Tensors) -> torch.Tensor:
    """Return dense host memory for all the tensors, one after the other."""
    return torch.empty(sum(_counts(tensors)), dtype=tensors[0].dtype, device="cpu")


def _flatten(tensors: Tensors) -> torch.Tensor:
    flat = _flat_for(tensors)
    for part, tensor in zip(flat.split(_counts(tensors)), tensors, strict=True):
        part.view(tensor.shape).copy_(tensor.detach())
    return flat


def _unflatten(flat: torch.Tensor, tensors: Tensors) -> None:
    for part, tensor in zip(flat.split(_counts(tensors)), tensors, strict=True):
        buffers.unpack(part.view(tensor.shape), tensor)


def _check_count(status: Any, dense: torch.Tensor) -> None:
    got = status.Get_count(dtypes.carrier(dense.dtype))
    if got != dense.numel():
        raise RuntimeError(
            f"recv: expected {dense.numel()} elements of {dtypes.short(dense.dtype)} from rank {status.source} "
            f"(tag {status.tag}), got {got}.\nSend and receive tensors of the same size."
        )


def _require_threads() -> None:
    if not mpi.serves_threads():
        raise MpicommError(
            "asynchronous operations need an MPI that serves several threads (MPI_THREAD_MULTIPLE), "
            "which this one refused.\nUse async_op=False, or let mpicomm.bootstrap() initialise MPI."
        )
