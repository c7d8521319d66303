"""The collectives, once: each turns tensors into buffers and makes one MPI call.

Who runs the call: a synchronous operation is one blocking call on the caller's
thread; an asynchronous one is queued for the group's worker, and from then on later operations queue behind it until
the worker is idle again, so that every rank's calls keep the order in which they were made.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpicomm import mpi
from mpicomm.backend import buffers, dtypes
from mpicomm.backend.agreement import Agreement
from mpicomm.backend.progress import Poller, Worker
from mpicomm.backend.reductions import Reduction
from mpicomm.backend.work import CompletedWork, MessageWork, QueuedWork
from mpicomm.errors import MpicommError
from mpicomm.faults import recorder, report, watchdog
from mpicomm.faults.recorder import Operation
from mpicomm.settings import Settings

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

_REAP_ABOVE = 32  # messages in flight, above which the finished ones are looked for
_LAST_MESSAGES_SECONDS = 1.0
_LATE_SECONDS = 1.0  # in which an operation that did not end in time may end after all, when its group is destroyed
_LONGEST_PAUSE, _SPINS = 1e-3, 200  # between two looks at a barrier, in seconds, and looks without a pause

_abandoned: list[MessageWork] = []
"""Messages of destroyed groups: MPI may still read and write their memory."""

Tensors = Sequence[torch.Tensor]


class Engine:
    """The operations of one group, on the group's own communicator.

    Arguments are taken as checked: dense or not, on host or GPU, but of the right number, shape and dtype.
    """

    def __init__(self, comm: Intracomm, record: recorder.Group, settings: Settings) -> None:
        self.comm = comm
        self.name = record.name
        self.record = record
        # How long the ranks wait for each other, interruptibly, before an operation; None: they go straight into it.
        self._patience = record.timeout if settings.raises_timeouts else math.inf if settings.compares_calls else None
        self.timeout_of_messages = record.timeout if settings.raises_timeouts else None
        self._agreement = Agreement(comm, list(record.ranks)) if settings.compares_calls else None
        self._outstanding: list[Request] = []  # barriers that did not end in time; MPI cannot take them back
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

        return self._launch("all_reduce", call, tensors, is_async, tensors, also=reductions[0].name)

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

        return self._launch("reduce", call, [tensor], is_async, [tensor], root=root, also=reduction.name)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, reduction: Reduction, is_async: bool) -> Any:
        """Reduce `source` (size times the output) and leave each rank its block."""
        dense, result = reduction.load(source, keep=True), reduction.room(output)
        if buffers.overlap(dense, result):  # the output may be this rank's block of the input; MPI forbids it
            result = torch.empty_like(result, device="cpu")

        def call() -> None:
            blocks = buffers.blocks_spec(dense, self.comm.size, reduction.datatype)
            self.comm.Reduce_scatter_block(blocks, reduction.spec(result), reduction.op)
            reduction.store(result, output)

        return self._launch("reduce_scatter", call, [output], is_async, [source], also=reduction.name)

    def broadcast(self, tensor: torch.Tensor, root: int, is_async: bool) -> Any:
        """Copy `root`'s tensor into everybody's."""
        is_root = self.comm.rank == root
        dense = buffers.pack(tensor) if is_root else buffers.room(tensor)

        def call() -> None:
            self.comm.Bcast(buffers.spec(dense), root)
            if not is_root:
                buffers.unpack(dense, tensor)

        return self._launch("broadcast", call, [tensor], is_async, [tensor], root=root)

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

        return self._launch("all_gather", call, [output], is_async, [source])

    def all_gather_list(self, outputs: Tensors, source: torch.Tensor, is_async: bool) -> Any:
        """Gather rank r's `source` into `outputs[r]`; the sizes may differ from rank to rank."""
        dense, flat, counts = buffers.pack(source), _flat_for(outputs), _counts(outputs)

        def call() -> None:
            self.comm.Allgatherv(buffers.spec(dense), buffers.vector_spec(flat, counts))
            _unflatten(flat, outputs)

        return self._launch("all_gather", call, outputs, is_async, outputs)

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

        return self._launch("gather", call, outputs, is_async, [source], root=root, any_size=True)

    def scatter(self, output: torch.Tensor, sources: Tensors, root: int, is_async: bool) -> Any:
        """Send `sources[r]` of `root` to rank r's `output`; `sources` is empty elsewhere."""
        result = buffers.room(output)
        flat = _flatten(sources) if sources else None
        counts = _counts(sources)

        def call() -> None:
            mine = None if flat is None else buffers.vector_spec(flat, counts)
            self.comm.Scatterv(mine, buffers.spec(result), root)
            buffers.unpack(result, output)

        return self._launch("scatter", call, [output], is_async, [output], root=root, any_size=True)

    def barrier(self, is_async: bool, seconds: float | None = None) -> Any:
        """Wait for every rank, for at most `seconds`, or the group's timeout."""
        self._check_open()
        runs_here = self._runs_here(is_async)
        operation = recorder.note(self.record, "barrier", None, 0, None, False, runs_here, 2)
        operation.ends_job = False  # TimeoutError does not
        seconds = seconds or self.record.timeout
        return self._start(operation, _nothing, [], is_async, "barrier", seconds, runs_here)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> MessageWork:
        """Start sending; the work is done when the tensor may be written again."""
        self._check_open()
        dense = buffers.pack(tensor)
        operation = recorder.note(self.record, "send", tensor.dtype, tensor.numel(), dst, True, False, 2)
        request = self.comm.Isend(buffers.spec(dense), dst, tag)
        return self._track(MessageWork([tensor], request, dense, operation, self))

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> MessageWork:
        """Start receiving from `src`, or from whoever sends first if it is None."""
        self._check_open()
        dense = buffers.room(tensor)

        def arrived(status: Any) -> None:
            _check_count(status, dense)
            buffers.unpack(dense, tensor)

        source = mpi.api().ANY_SOURCE if src is None else src
        operation = recorder.note(self.record, "recv", tensor.dtype, tensor.numel(), src, True, False, 2)
        request = self.comm.Irecv(buffers.spec(dense), source, tag)
        return self._track(MessageWork([tensor], request, dense, operation, self, arrived))

    def watch(self, work: MessageWork) -> None:
        """Finish a message whose future somebody holds when it is through."""
        self._get_poller().watch(work)

    def forget(self, work: MessageWork) -> None:
        """Let go of a message that is through."""
        self._in_flight.discard(work)

    # -- who runs it ---------------------------------------------------------------------------------------------

    def _launch(
        self,
        name: str,
        call: Callable[[], None],
        results: Tensors,
        is_async: bool,
        subjects: Tensors,
        *,
        root: int | None = None,
        also: str = "",
        any_size: bool = False,
    ) -> Any:
        """Record a collective and start it.

        Args:
            results: What the operation writes here.
            subjects: What all ranks call it with: of equal dtype, and of equal shape unless `any_size`.
            also: What else must be equal on all ranks.
        """
        self._check_open()
        count = subjects[0].numel() if len(subjects) == 1 else sum(each.numel() for each in subjects)
        said = "" if self._agreement is None else _say(name, subjects, root, also, any_size)
        runs_here = self._runs_here(is_async)
        # Above this method are the engine's own, and two of the face's or one and torch's.
        operation = recorder.note(self.record, name, subjects[0].dtype, count, root, False, runs_here, 4)
        return self._start(operation, call, list(results), is_async, said, self._patience, runs_here)

    def _start(
        self,
        operation: Operation,
        call: Callable[[], None],
        results: list[torch.Tensor],
        is_async: bool,
        said: str,
        patience: float | None,
        runs_here: bool,
    ) -> Any:
        """Run `call` now, or queue it behind what is queued.

        Args:
            said: What all ranks must agree on, where they compare it.
            patience: Seconds to wait for the other ranks before the call; None to go straight into it.
            runs_here: Whether `call` is to run now.

        Returns:
            The work; finished already if the operation is synchronous.
        """
        if runs_here:
            self._run(operation, call, said, patience)
            return CompletedWork(results)
        work = QueuedWork(results, operation, self)

        def in_turn() -> None:
            operation.begin()
            self._run(operation, call, said, patience)

        self._get_worker().submit(in_turn, work)
        if not is_async:
            work.wait()
        return work

    def _run(self, operation: Operation, call: Callable[[], None], said: str, patience: float | None) -> None:
        """Run a collective in its turn, and note when it ends."""
        try:
            with self._turn:
                if patience is not None:
                    self._meet(operation, patience)
                if self._agreement is not None:
                    self._agreement.check(said, operation)
                call()
        except mpi.api().Exception as error:
            self.record.broken = f"{report.operation(operation.describe(0.0))} failed: {error}"
            raise
        finally:
            operation.finish()

    def _meet(self, operation: Operation, seconds: float) -> None:
        """Wait for every rank, interruptibly.

        Raises:
            TimeoutError: If a rank has not come after `seconds`; it names those that have not.
            MpicommError: If another rank did not wait that long.
        """
        request = self.comm.Ibarrier()
        is_late = not mpi.poll(
            lambda: request.Test() or bool(self.record.broken), seconds, longest_pause=_LONGEST_PAUSE, spins=_SPINS
        )
        if is_late or self.record.broken:
            self._outstanding.append(request)
            self._check_open()
            raise self.time_out(operation, seconds)

    def time_out(self, operation: Operation, seconds: float) -> TimeoutError:
        """Return the error of a collective that did not end in time; the group cannot be used any more."""
        what = report.operation(operation.describe(0.0))
        self.record.broken = f"{what} did not end within {seconds:g} s"
        watch = watchdog.current()
        missing, table = watch.missing(operation) if watch is not None else ([], "Another rank has not come to it.")
        if watch is not None:
            watch.break_group(self.name, f"{self.record.broken} on rank {watch.place.rank}")
        if not missing:
            return TimeoutError(f"{self.record.broken}.\n{table}\nFind out what that rank does.")
        return TimeoutError(
            f"{what}: {len(missing)} of {self.comm.size} ranks did not come within {seconds:g} s: "
            f"{report.called(missing)}.\n{table}\n"
            f"Look at what they do there, or allow more time. The group cannot be used any more."
        )

    def run_what_is_before(self, work: QueuedWork) -> None:
        """On the worker's own thread, where waiting would wait for itself, run what is queued until `work` is done."""
        if self._worker is not None and self._worker.is_current_thread:
            self._worker.run_until(work.is_completed)

    def drain(self) -> None:
        """Wait until what is queued has run."""
        if self._worker is not None and not self.record.broken:
            self._worker.wait_until_idle()

    def advance(self) -> None:
        """Let messages that are on their way make progress."""
        if self._is_open and not self.record.broken:
            self._reap()

    def close(self) -> None:
        """Finish what is queued, end the threads and free the communicator (collective)."""
        if not self._is_open:
            return
        self._is_open = False
        if mpi.is_abandoned() or self.is_stuck():
            mpi.abandon()
            return
        operation = recorder.note(self.record, "destroy", None, 0, None, False, True, 2)
        try:
            self._take_down()
        finally:
            operation.finish()
            self.record.is_closed = True

    def is_stuck(self) -> bool:
        """Tell whether an operation that did not end in time has not ended yet, and may never."""
        return bool(self.record.broken) and not mpi.poll(self._is_at_rest, _LATE_SECONDS, longest_pause=_LONGEST_PAUSE)

    def _take_down(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        if self._poller is not None:
            self._poller.stop()
        self._finish_messages()
        self.comm.Free()

    def _is_at_rest(self) -> bool:
        """Tell whether MPI has nothing left to do for a group that is broken: the late ranks may have come."""
        self._outstanding = [request for request in self._outstanding if not request.Test()]
        return not self._outstanding and (self._worker is None or self._worker.is_idle)

    def _runs_here(self, is_async: bool) -> bool:
        worker = self._worker
        if worker is not None and worker.is_current_thread:
            return True  # a callback that queued an operation and waited for it would wait for itself
        return not is_async and (worker is None or worker.is_idle)

    def _check_open(self) -> None:
        if not self._is_open:
            raise MpicommError(f"group {self.name} is destroyed.\nMake a new one with torch.distributed.new_group().")
        if self.record.broken:
            raise MpicommError(f"group {self.name} cannot be used any more: {self.record.broken}.\nEnd the job.")

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


def _nothing() -> None:
    """Do what a barrier does once the ranks have met."""


def _say(name: str, subjects: Tensors, root: int | None, also: str, any_size: bool) -> str:
    """Return what all ranks of a collective must agree on."""
    shown = [dtypes.short(each.dtype) + ("" if any_size else str(list(each.shape))) for each in subjects]
    return " ".join(
        filter(None, [name, also, ", ".join(shown), "" if root is None else f"(root: rank {root} of the group)"])
    )


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
