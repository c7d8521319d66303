"""The executor of a group's operations: on the caller's thread, on the group's worker thread, or as MPI requests.

A synchronous collective is one blocking MPI call on the caller's thread. An asynchronous collective is queued for the
group's worker thread; later collectives queue behind it until the worker is idle, so each rank keeps the order of its
calls. Point-to-point messages are MPI requests; the thread that waits for a message drives its progress.
"""

from __future__ import annotations

import collections
import datetime
import math
import threading
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpicomm import mpi
from mpicomm.backend import callbacks, dtypes, torch_internals
from mpicomm.backend.buffers import Tensors
from mpicomm.backend.callbacks import OrderedFuture
from mpicomm.backend.debug_check import DebugCheck
from mpicomm.backend.work import CompletedWork, MessageWork, QueuedWork
from mpicomm.backend.worker_thread import Poller, Worker
from mpicomm.errors import MpicommError
from mpicomm.settings import Settings
from mpicomm.watchdog import agent, flight_recorder, hang_report
from mpicomm.watchdog.flight_recorder import Operation

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

_REAP_ABOVE = 32  # in-flight messages above which the executor looks for completed ones
_LAST_MESSAGES_SECONDS = 1.0  # for in-flight messages to complete when the group is destroyed
_LATE_SECONDS = 1.0  # grace period for a timed-out operation to complete when its group is destroyed

_NO_TIME = datetime.timedelta(0)
_KEPT, _FEW = 64, 64  # number of works kept alive, and the maximum number of elements of their tensors

_abandoned: list[MessageWork] = []
"""In-flight messages of destroyed groups, kept alive: MPI may still read and write their memory."""


class CallOptions(Protocol):
    """The fields that all options classes of torch share."""

    asyncOp: bool  # noqa: N815  torch's name
    timeout: datetime.timedelta
    """The timeout of the call; zero or less selects the group's timeout."""


class Executor:
    """Runs the operations of one group, on the group's own communicator."""

    def __init__(
        self, comm: Intracomm, record: flight_recorder.Group, settings: Settings, on_close: Callable[[], None]
    ) -> None:
        """Prepare to run operations.

        Args:
            on_close: Called when the group is destroyed, before its communicator is freed (collective).
        """
        self._comm = comm
        self._on_close = on_close
        self._record = record
        self._raises_timeouts = settings.raises_timeouts
        self._debug_check = DebugCheck(comm, list(record.ranks)) if settings.compares_calls else None
        self._keeps_communicator = False
        self._outstanding: list[Request] = []  # barriers that timed out; MPI cannot cancel them
        self._turn = threading.Lock()  # MPI requires collective calls on one communicator to be serialised
        self._try_turn, self.give_turn_back = self._turn.acquire, self._turn.release
        # Whether collectives run without a preceding check or barrier.
        self._is_simple = self._debug_check is None and not self._raises_timeouts
        self._starting = threading.Lock()
        self._worker: Worker | None = None
        self._poller: Poller | None = None
        self._in_flight: set[MessageWork] = set()
        self._reap_at = _REAP_ABOVE
        self._events: dict[MessageWork, Any] = {}  # profiler spans of in-flight messages
        self.title = "mpicomm"  # the name of the backend in the profiler
        self._kept: collections.deque[QueuedWork] = collections.deque(maxlen=_KEPT)
        self._batch = threading.local()  # `works`: the works of this thread's open coalescing manager
        self._is_open = True

    @property
    def timeout_of_messages(self) -> float | None:
        """Seconds until waiting for a message raises TimeoutError; None if the watchdog aborts the job instead."""
        return self._record.timeout if self._raises_timeouts else None

    # -- collectives ---------------------------------------------------------------------------------------------

    def launch(
        self,
        name: str,
        call: Callable[[], None],
        results: Tensors,
        opts: CallOptions,
        subjects: Tensors,
        *,
        root: int | None = None,
        also: str = "",
        any_size: bool = False,
        inputs: Tensors | None = None,
    ) -> Any:
        """Record a collective operation and start it.

        Args:
            results: The tensors that the operation writes on this rank.
            subjects: The tensors to compare between ranks: equal dtypes, and equal shapes unless `any_size`.
            also: Further text that must be equal on all ranks.
            inputs: The inputs to report to the profiler; default: the subjects.
        """
        # 1. check the group, and wrap the call for inference mode and the profiler
        self._check_open()
        if results and results[0].is_inference():
            call = _inferring(call)
        if torch_internals.is_profiling():
            call = self._profiled(call, name, subjects if inputs is None else inputs)
        count = subjects[0].numel() if len(subjects) == 1 else sum(each.numel() for each in subjects)
        signature = "" if self._debug_check is None else _signature(name, subjects, root, also, any_size)
        runs_here = self._runs_here(opts.asyncOp)
        # 2. record the call
        operation = flight_recorder.note(self._record, name, subjects[0].dtype, count, root, False, runs_here)
        if (timeout := opts.timeout) > _NO_TIME:
            operation.limit = timeout.total_seconds()
        # 3. run or queue the call
        return self._start(
            operation, call, list(results), opts.asyncOp, signature, self._wait_limit(operation), runs_here
        )

    def barrier(self, opts: CallOptions) -> Any:
        """Wait for every rank, for at most the timeout of the options, or of the group (collective)."""
        self._check_open()
        runs_here = self._runs_here(opts.asyncOp)
        operation = flight_recorder.note(self._record, "barrier", None, 0, None, False, runs_here)
        operation.limit = None  # TimeoutError is raised instead
        seconds = opts.timeout.total_seconds()
        seconds = seconds if seconds > 0 else self._record.timeout
        return self._start(operation, _nothing, [], opts.asyncOp, "barrier", seconds, runs_here)

    def note_own(self, name: str) -> Operation:
        """Record an operation that the caller implements with its own messages and finishes itself.

        The operation has no sequence number and no timeout in the watchdog.
        """
        self._check_open()
        operation = flight_recorder.note(self._record, name, None, 0, None, True, True)
        operation.limit = None
        return operation

    def _profiled(self, call: Callable[[], None], name: str, inputs: Tensors) -> Callable[[], None]:
        """Start a profiler span; return a call that runs `call` and ends the span."""
        event = torch_internals.start_event(f"{self.title}:{name}", inputs)

        def profiled() -> None:
            try:
                call()
            finally:
                torch_internals.end_event(event)

        return profiled

    def _wait_limit(self, operation: Operation) -> float | None:
        """Return the timeout in seconds of the interruptible barrier before the operation; None for no barrier."""
        if self._raises_timeouts:
            return operation.limit
        return math.inf if self._debug_check is not None else None

    def _start(
        self,
        operation: Operation,
        call: Callable[[], None],
        results: list[torch.Tensor],
        is_async: bool,
        signature: str,
        wait_limit: float | None,
        runs_here: bool,
    ) -> Any:
        """Run `call` now, or queue it behind the operations that are already queued.

        Args:
            signature: Text that must be equal on all ranks; used only if the ranks compare their calls.
            wait_limit: Timeout in seconds of the barrier before the call; None for no barrier.
            runs_here: Whether to run `call` now, on this thread.

        Returns:
            The work; already completed if the operation is synchronous.
        """
        if runs_here:
            self._run(operation, call, signature, wait_limit)
            done = CompletedWork()
            done.tensors = results
            return done
        work = QueuedWork(results, operation, self)

        def in_turn() -> None:
            operation.begin()
            self._run(operation, call, signature, wait_limit)

        self._keep(work)
        self.remember(work)
        # Submit last: the worker thread then competes for the GIL.
        self._get_worker().submit(in_turn, work, callbacks.before(self))
        if not is_async:
            work.wait()
        return work

    def _keep(self, work: QueuedWork) -> None:
        """Keep a work of small tensors alive after its caller has dropped it.

        DDP's `join` passes a work to C++ and drops it. C++ calls it at the end of the next backward pass; without the
        Python part, the work would have no methods.
        """
        if all(tensor.numel() <= _FEW for tensor in work.result()):
            self._kept.append(work)

    def _run(self, operation: Operation, call: Callable[[], None], signature: str, wait_limit: float | None) -> None:
        """Run a collective under the lock, and record its end."""
        try:
            with self._turn:
                if wait_limit is not None:
                    self._wait_for_all(operation, wait_limit)
                if self._debug_check is not None:
                    self._debug_check.check(signature, operation)
                call()
        except BaseException as error:
            if not getattr(error, "is_on_all_ranks", False):
                self.mark_broken(operation, error)
            raise
        finally:
            operation.finish()

    def mark_broken(self, operation: Operation, error: BaseException) -> None:
        """Mark the group as unusable: the next call of this rank may not match the calls of the other ranks.

        Args:
            error: The exception that ended the operation on this rank; a signal handler may raise any exception
                between two parts of an operation.
        """
        if self._record.broken:
            return
        how = f"failed: {error}" if isinstance(error, Exception) else f"was interrupted by {type(error).__name__}"
        self._record.broken = f"{hang_report.operation(operation.describe(0.0))} {how}"
        if (watch := agent.current()) is not None:
            watch.break_group(self._record.name, f"{self._record.broken} on rank {watch.place.rank}")

    def take_turn(self) -> bool:
        """Acquire the lock for a collective without queueing, check or barrier; return whether that succeeded.

        On success the caller must call `give_turn_back`.
        """
        worker = self._worker
        if (worker is not None and (worker.is_current_thread or not worker.is_idle)) or callbacks.may_matter():
            return False
        if not self._is_simple or not self._is_open:
            return False
        return not self._record.broken and not torch_internals.is_profiling() and self._try_turn(False)

    def _wait_for_all(self, operation: Operation, seconds: float) -> None:
        """Wait for every rank in a barrier that Python can interrupt (collective).

        Raises:
            TimeoutError: If a rank has not arrived after `seconds`; the message lists the missing ranks.
            MpicommError: If the group broke meanwhile, e.g. another rank timed out earlier.
        """
        limit, start = operation.limit, time.monotonic()
        if self._raises_timeouts:
            operation.limit = None
        request = self._comm.Ibarrier()
        is_late = not mpi.poll(lambda: request.Test() or bool(self._record.broken), seconds)
        if is_late or self._record.broken:
            self._outstanding.append(request)
            self._check_open()
            raise self.time_out(operation, seconds)
        if self._raises_timeouts:  # the MPI call cannot be interrupted: from here the watchdog enforces the timeout
            operation.limit = limit
            operation.extend_deadline(time.monotonic() - start)

    def time_out(self, operation: Operation, seconds: float) -> TimeoutError:
        """Return the error of a collective that timed out, and mark the group as unusable."""
        # 1. mark the group; the program receives the error and may continue, so the watchdog must not abort the job
        what = hang_report.operation(operation.describe(0.0))
        self._record.broken = f"{what} timed out after {seconds:g} s"
        operation.limit = None
        # 2. ask the watchdog for the missing ranks, and tell it that the group is broken
        watch = agent.current()
        missing, table = (
            watch.missing(operation) if watch is not None else ([], "At least one rank has not reached it.")
        )
        operation.pause()
        if watch is not None:
            watch.break_group(self._record.name, f"{self._record.broken} on rank {watch.place.rank}")
        # 3. compose the error
        if not missing:
            return TimeoutError(
                f"{self._record.broken}.\n{table}\nCheck the output of the other ranks, or increase the timeout."
            )
        return TimeoutError(
            f"{what} timed out after {seconds:g} s: {len(missing)} of {self._comm.size} ranks did not reach it: "
            f"{hang_report.called(missing)}.\n{table}\nThe group cannot be used any more.\n"
            f"Check what the missing ranks are doing, or increase the timeout of the operation."
        )

    def add_callback(self, future: OrderedFuture, run: Callable[[], None]) -> None:
        """Queue a callback of an operation's future behind the operations that are already queued."""
        worker = self._worker
        if worker is None or not self._is_open:
            torch.futures.Future.add_done_callback(future, lambda _future: run())
            return
        if worker.is_current_thread:
            worker.run_until(future.done)
        elif (outer := callbacks.current()) is not None:
            worker.wait_for_place_of(outer)
        if callbacks.is_inside_callback() and future.done():
            run()
            return
        callback, earlier = callbacks.add(self, run)
        worker.submit(_nothing, callback, earlier)

    def run_queued_until(self, work: QueuedWork, *, may_block: bool) -> None:
        """Run queued operations until `work` is done, or until another thread has to run them.

        Args:
            may_block: Whether this thread may block in MPI. If it runs a callback it always may, since waiting there
                for the worker would deadlock.
        """
        flight_recorder.refuse_children()
        worker = self._worker
        if worker is None or work.is_completed():
            return
        if worker.is_current_thread:
            worker.run_until(work.is_completed)
        elif may_block:
            worker.run_for(work)

    # -- messages ------------------------------------------------------------------------------------------------

    def note_message(self, name: str, tensor: torch.Tensor, peer: int | None) -> Operation:
        """Record a point-to-point message in the flight recorder."""
        self._check_open()
        operation = flight_recorder.note(self._record, name, tensor.dtype, tensor.numel(), peer, True, False)
        if self._raises_timeouts:
            operation.limit = None
        return operation

    def track(self, name: str, work: MessageWork) -> MessageWork:
        """Keep a message and its buffers alive until it completes, even if the caller drops the work."""
        if len(self._in_flight) >= self._reap_at:
            self._reap()
            self._reap_at = max(_REAP_ABOVE, 2 * len(self._in_flight))
        if torch_internals.is_profiling():
            self._events[work] = torch_internals.start_event(f"{self.title}:{name}", work.result())
        self._in_flight.add(work)
        self._let_advance(work)
        self.remember(work)
        return work

    def _let_advance(self, work: MessageWork) -> None:
        """Wake the poller thread, so that the message progresses while its rank computes."""
        poller = self._poller
        if (poller is not None and not poller.is_idle) or work.is_completed() or not mpi.serves_threads():
            return
        self._get_poller().rouse()

    def watch(self, work: MessageWork) -> None:
        """Let the poller thread complete the future of a message when the message completes."""
        self._get_poller().watch(work)

    def forget(self, work: MessageWork) -> None:
        """Drop the references to a completed message, and end its profiler span."""
        self._in_flight.discard(work)
        if self._events:
            torch_internals.end_event(self._events.pop(work, None))

    # -- batches -------------------------------------------------------------------------------------------------

    def start_batch(self) -> None:
        """Start a batch on this thread: collect the works of later operations."""
        self._batch.works = []

    def end_batch(self) -> list[Any]:
        """End the batch of this thread; return the works of its operations that did not complete within their call."""
        return self._batch.__dict__.pop("works", [])

    def remember(self, work: Any) -> None:
        """Add a work to the batch of this thread, if one is open."""
        works = self._batch.__dict__.get("works")
        if works is not None:
            works.append(work)

    # -- shutdown ------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until all queued operations have run."""
        if self._worker is not None and not self._record.broken:
            self._worker.wait_until_idle()

    def advance(self) -> None:
        """Drive the progress of in-flight messages."""
        if self._is_open and not self._record.broken:
            self._reap()

    def is_sending(self) -> bool:
        """Return whether sent messages are still in flight."""
        self.advance()
        return any(work.is_sent for work in list(self._in_flight))

    def close(self) -> None:
        """Finish the queued operations, end the threads and free the communicator (collective)."""
        if not self._is_open:
            return
        self._is_open = False
        if mpi.is_abandoned() or self.is_stuck():
            mpi.abandon()
            return
        operation = flight_recorder.note(self._record, "destroy", None, 0, None, False, True)
        try:
            self._take_down()
        finally:
            operation.finish()
            self._record.is_closed = True

    def abort(self) -> None:
        """Abort the group without waiting for other ranks; operations in progress may never complete."""
        # 1. mark the group, here and on the other ranks
        if not self._is_open:
            return
        self._is_open = False
        self._record.broken = self._record.broken or "it was aborted"
        if (watch := agent.current()) is not None:
            watch.break_group(self._record.name, f"it was aborted on rank {watch.place.rank}")
        # 2. fail the queued operations and the in-flight messages
        if self._poller is not None:
            self._poller.stop()
        error = MpicommError(f"group {self._record.name} was aborted before the operation completed.\nEnd the job.")
        if self._worker is not None:
            self._worker.give_up(error)
        if self._in_flight or not self._is_at_rest():
            mpi.abandon()
        for message in list(self._in_flight):
            message.give_up(error)
        _abandoned.extend(self._in_flight)  # MPI may still read and write their memory

    def is_stuck(self) -> bool:
        """Return whether an operation of a broken group is still not complete, after a grace period."""
        return bool(self._record.broken) and not mpi.poll(self._is_at_rest, _LATE_SECONDS)

    def keep_communicator(self) -> None:
        """Never free the communicator: an unmatched message or receive remains on it.

        MPICH 4.0 reuses the context ID of a freed communicator for the next one, and then matches messages across the
        two (seen in 4.0.2, not in 5.0).
        """
        self._keeps_communicator = True

    def _take_down(self) -> None:
        self._kept.clear()
        if self._worker is not None:
            self._worker.stop()
        if self._poller is not None:
            self._poller.stop()
        self._finish_messages()
        self._on_close()
        if not self._keeps_communicator:
            self._comm.Free()

    def _is_at_rest(self) -> bool:
        """Return whether no MPI call of a broken group is pending: late ranks may have completed the barriers."""
        self._outstanding = [request for request in self._outstanding if not request.Test()]
        return not self._outstanding and (self._worker is None or self._worker.is_idle)

    def _runs_here(self, is_async: bool) -> bool:
        callbacks.refuse_in_messages()
        worker = self._worker
        if worker is not None and worker.is_current_thread:
            return True  # a callback: queueing an operation and waiting for it would deadlock
        if (callback := callbacks.current()) is not None:
            if worker is not None:
                worker.wait_for_place_of(callback)
            return True
        return not is_async and (worker is None or worker.is_idle) and not callbacks.before(self)

    def _check_open(self) -> None:
        name = self._record.name
        if self._record.broken:
            flight_recorder.refuse_children()
            raise MpicommError(f"group {name} cannot be used any more: {self._record.broken}.\nEnd the job.")
        if not self._is_open:
            raise MpicommError(f"group {name} was destroyed.\nCreate a new one with torch.distributed.new_group().")

    def _get_worker(self) -> Worker:
        with self._starting:
            if self._worker is None:
                _require_threads()
                self._worker = Worker(f"mpicomm-worker-{self._record.name}")
            return self._worker

    def _get_poller(self) -> Poller:
        with self._starting:
            if self._poller is None:
                _require_threads()
                self._poller = Poller(f"mpicomm-poller-{self._record.name}", self._has_messages_left)
            return self._poller

    def _has_messages_left(self) -> bool:
        """Test every in-flight message once; return whether any remains in flight."""
        self._reap()
        return bool(self._in_flight)

    def _reap(self) -> None:
        for work in list(self._in_flight):
            work.is_completed()  # a completed message calls `forget`

    def _finish_messages(self) -> None:
        def all_through() -> bool:
            self._reap()
            return not self._in_flight

        if not mpi.poll(all_through, _LAST_MESSAGES_SECONDS, longest_pause=1e-4):
            warnings.warn(
                f"group {self._record.name} is destroyed with {len(self._in_flight)} messages in flight. "
                f"Call wait() on the works of isend and irecv first.",
                stacklevel=4,
            )
            _abandoned.extend(self._in_flight)
            self.keep_communicator()


def _inferring(call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that may write inference tensors on any thread."""

    def inferring() -> None:
        with torch.inference_mode():
            call()

    return inferring


def _nothing() -> None:
    """Do nothing: the call of a barrier, which only synchronises, and of a queued callback."""


def _signature(name: str, subjects: Tensors, root: int | None, also: str, any_size: bool) -> str:
    """Return the text that must be equal on all ranks of a collective, e.g. `broadcast float32[4] (root: ...)`."""
    shown = [dtypes.short(each.dtype) + ("" if any_size else str(list(each.shape))) for each in subjects]
    return " ".join(
        filter(None, [name, also, ", ".join(shown), "" if root is None else f"(root: rank {root} of the group)"])
    )


def _require_threads() -> None:
    if not mpi.serves_threads():
        raise MpicommError(
            "asynchronous operations require the MPI thread level MPI_THREAD_MULTIPLE, "
            "but MPI provides a lower level.\nUse async_op=False, or let mpicomm.bootstrap() initialise MPI."
        )
