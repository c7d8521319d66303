"""The executor of a group's operations: on the caller's thread, on the group's worker thread, or as MPI requests.

A synchronous collective is one blocking MPI call on the caller's thread. An asynchronous collective is queued for the
group's worker thread; later collectives queue behind it until the worker is idle, so each rank keeps the order of its
calls. Point-to-point messages are MPI requests (pending_messages.py).
"""

from __future__ import annotations

import collections
import datetime
import functools
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpicomm import mpi, torch_internals
from mpicomm.backend.execution import future_callbacks
from mpicomm.backend.execution.future_callbacks import OrderedFuture
from mpicomm.backend.execution.group_state import GroupState, MonitoredBarrier
from mpicomm.backend.execution.pending_messages import PendingMessages
from mpicomm.backend.execution.work import CompletedWork, QueuedWork, WorkBatch
from mpicomm.backend.execution.worker_thread import Jobs, QueuedJob, Worker, require_threads
from mpicomm.backend.gpu.transport import Transport
from mpicomm.backend.operations import Collective
from mpicomm.backend.transfer.algorithms import AlgorithmSelector
from mpicomm.backend.transfer.dense_collectives import DenseCollectives
from mpicomm.errors import MpicommError
from mpicomm.recorder import flight_recorder
from mpicomm.recorder.flight_recorder import Operation
from mpicomm.settings import Settings
from mpicomm.watchdog import rank_failures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_LATE_SECONDS = 1.0  # grace period for an operation in progress to return, when its broken or revoked group ends

_LONG_BYTES = 2**22  # from this size on, an asynchronous operation starts before its call returns
_NO_TIME = datetime.timedelta(0)
_MAX_KEPT_WORKS = 64
MAX_KEPT_ELEMENTS = 64
"""The largest tensors whose works stay alive after their callers have dropped them (see `_kept_works`): those of DDP's
`join`, one per step, have one element. Works of large tensors would hold the memory of gradients."""


class CallOptions(Protocol):
    """The fields that all options classes of torch share."""

    asyncOp: bool  # noqa: N815  torch's name
    timeout: datetime.timedelta
    """The timeout of the call; zero or less selects the group's timeout."""


class Executor:
    """Runs the operations of one group, on the group's own communicator."""

    def __init__(
        self, comm: Intracomm, record: flight_recorder.Group, settings: Settings, transport: Transport
    ) -> None:
        """Prepare to run operations on a communicator of the group's own, which this frees."""
        self.comm = comm
        self.record = record
        self.transport = transport
        self.algorithms = AlgorithmSelector(comm, record, settings)
        self.dense = DenseCollectives(comm, self.algorithms)
        self._compares_calls = settings.debug
        self._uses_slots_for_barriers = not settings.debug and settings.on_timeout != "raise"
        # Not if a check or a barrier precedes collectives.
        self.takes_plain_calls = settings.native and self._uses_slots_for_barriers
        """Whether the extension module may run collectives on plain tensors."""

        self._state = GroupState(comm, record, raises_timeouts=settings.on_timeout == "raise")
        self.backend_name = "mpicomm"
        """The prefix of spans in torch's profiler; the process group sets it."""

        self.batch = WorkBatch()
        self.messages = PendingMessages(comm, transport, self._state, self.batch)
        self._monitored = MonitoredBarrier(comm)
        self._lock = threading.Lock()  # MPI requires collective calls on one communicator to be serialised
        self._starting_worker = threading.Lock()
        self._jobs: Jobs = collections.deque()
        self._worker: Worker | None = None
        # The last works of few elements, alive after their callers have dropped them: DDP's `join` passes a work to C++
        # and drops it. C++ calls it at the end of the next backward pass, and finds no methods without its Python part.
        self._kept_works: collections.deque[QueuedWork] = collections.deque(maxlen=_MAX_KEPT_WORKS)
        # Whether an unmatched message or receive remains. MPICH 4.0 reuses the context ID of a freed communicator for
        # the next one, and then matches messages across the two (seen in 4.0.2, not in 5.0).
        self._keeps_communicator = False

    # -- collectives ---------------------------------------------------------------------------------------------

    def submit(self, collective: Collective, opts: CallOptions) -> Any:
        """Record a collective operation and start it; return its work."""
        self._state.check_open()
        call = collective.prepared(self.transport)
        if torch_internals.is_profiling():
            title = f"{self.backend_name}:{collective.name}"
            call = _spanned(call, torch_internals.start_event(title, collective.inputs))
        dtype = collective.compared[0].dtype
        signature = collective.signature if self._compares_calls else ""
        results = list(collective.results)
        return self._submit(collective.name, dtype, collective.count, collective.root, opts, results, call, signature)

    def parts_of_plain_calls(self) -> dict[str, Any]:
        """Return the objects with which the extension module runs the group's plain calls, in turn with `submit`."""
        return {
            "group": self.record,
            "executor": self,
            "state": self._state,
            "jobs": self._jobs,
            "acquire": self._lock.acquire,
            "release": self._lock.release,
            "queue": self._queue_plain,
            "fail": self._state.fail,
            "keep_work": self._kept_works.append,
            "batch": self.batch,
            "make_job": self._make_job,
            "make_call": functools.partial(functools.partial, self._run),
            "add_first": self._jobs.appendleft,
            "wake": lambda job: self._get_worker().wake_for(job),
            "check_barrier": self._check_plain_barrier,
        }

    def _check_plain_barrier(self, operation: Operation, opts: CallOptions) -> None:
        """Check the timeout of a barrier that waits in the extension module."""
        seconds = opts.timeout.total_seconds()
        self._state.check_barrier(operation, seconds if seconds > 0 else operation.usual_limit)

    def _make_job(self) -> QueuedJob:
        """Return a job for a call that has begun on its caller's thread; the extension module sets its fields."""
        return self._get_worker().make_job(_nothing, QueuedWork([], None, self))  # type: ignore[arg-type]

    def _queue_plain(
        self,
        call: Callable[[], None],
        name: str,
        dtype: torch.dtype,
        count: int,
        root: int | None,
        opts: CallOptions,
        results: list[torch.Tensor],
    ) -> Any:
        """Do the same as `submit` for a plain call, which needs no preparation."""
        if not self._is_usable():
            self._state.check_open()
        return self._submit(name, dtype, count, root, opts, results, call, "")

    def barrier(self, opts: CallOptions) -> Any:
        """Wait for every rank, for at most the timeout of the options, or of the group (collective)."""
        self._state.check_open()
        return self._submit("barrier", None, 0, None, opts, [], _nothing, "barrier")

    def monitored_barrier(self, seconds: float, *, names_all: bool) -> None:
        """Wait for all ranks; the error on rank 0 lists the missing ranks, and the group stays usable."""
        self._state.check_open()
        # A message: it has no sequence number. It raises its own error, so the watchdog must not end the job.
        operation = flight_recorder.note(
            self.record, "monitored_barrier", None, 0, None, is_message=True, is_running=True
        )
        operation.exempt_from_watchdog()
        try:
            self._monitored.wait(seconds, names_all=names_all)
        except RuntimeError as error:
            rank_failures.raise_if_failed(error)
            self._keeps_communicator = True  # a late rank may still send a message that this rank does not receive
            raise
        finally:
            operation.finish()

    def _submit(
        self,
        name: str,
        dtype: torch.dtype | None,
        count: int,
        root: int | None,
        opts: CallOptions,
        results: list[torch.Tensor],
        call: Callable[[], None],
        signature: str,
    ) -> Any:
        """Record a call; run it now, or queue it behind the operations that are already queued.

        Args:
            signature: Text that must be equal on all ranks; used only if the ranks compare their calls.

        Returns:
            The work; already completed if the operation is synchronous.
        """
        if torch.is_inference_mode_enabled() or (results and results[0].is_inference()):
            call = functools.partial(_in_inference_mode, call)
        runs_here = self._runs_here(opts.asyncOp)
        operation = self._note(name, dtype, count, root, opts, runs_here)
        run = functools.partial(self._run, operation, call, signature, self._wait_limit(operation))
        if runs_here:
            run()
            return CompletedWork.of(results)
        work = QueuedWork(results, operation, self)
        if count <= MAX_KEPT_ELEMENTS and all([tensor.numel() <= MAX_KEPT_ELEMENTS for tensor in results]):  # noqa: C419  faster
            self._kept_works.append(work)
        self.batch.add(work)
        # Submit last: the worker thread then competes for the GIL.
        is_long = dtype is not None and count * dtype.itemsize >= _LONG_BYTES
        after = future_callbacks.before_next_call(self) if future_callbacks.pending else ()
        self._get_worker().submit(run, work, after, is_long=is_long)
        if not opts.asyncOp:
            work.wait()
        return work

    def _note(
        self, name: str, dtype: torch.dtype | None, count: int, root: int | None, opts: CallOptions, is_running: bool
    ) -> Operation:
        """Record a call, with its own timeout if it has one."""
        operation = flight_recorder.note(self.record, name, dtype, count, root, is_message=False, is_running=is_running)
        if (timeout := opts.timeout) > _NO_TIME:
            operation.limit = timeout.total_seconds()
        return operation

    def _wait_limit(self, operation: Operation) -> float | None:
        """Return the timeout in seconds of the interruptible barrier before the operation; None for no barrier."""
        if operation.name == "barrier":  # raises TimeoutError; the watchdog must not end the job
            seconds = operation.limit
            operation.exempt_from_watchdog()
            return seconds
        if self._state.raises_timeouts:
            return operation.limit
        return math.inf if self._compares_calls else None

    def _run(self, operation: Operation, call: Callable[[], None], signature: str, wait_limit: float | None) -> None:
        """Run a collective under the lock, and record its end."""
        try:
            if operation.start is None:  # it was queued
                operation.begin()
            with self._lock:
                if wait_limit is not None:
                    self._wait_for_all(operation, wait_limit)
                if self._compares_calls:
                    self._state.compare_calls(signature, operation)
                call()
        except BaseException as error:
            if operation.start is not None:
                self._state.fail(operation, error)
            raise
        finally:
            if operation.start is not None:  # otherwise a signal handler was earlier, and the worker's thread runs it
                operation.finish()

    def _wait_for_all(self, operation: Operation, seconds: float) -> None:
        """Wait in a barrier that Python can interrupt; like all operations, a barrier uses slots once they are open."""
        slots = self.algorithms.slots
        if operation.name == "barrier" and slots is not None and self._uses_slots_for_barriers:
            slots.barrier(functools.partial(self._state.check_barrier, operation, seconds))
        else:
            self._state.wait_for_all(operation, seconds)

    def _is_usable(self) -> bool:
        """Return whether operations can run."""
        return self._state.is_open and not self.record.broken

    def time_out(self, operation: Operation, seconds: float) -> TimeoutError:
        """Return the error of a collective that timed out; the group becomes unusable."""
        return self._state.time_out(operation, seconds)

    def add_callback(self, future: OrderedFuture, run: Callable[[], None]) -> None:
        """Queue a callback of an operation's future behind the operations that are already queued."""
        worker = self._worker
        if worker is None or not self._state.is_open:
            torch.futures.Future.add_done_callback(future, lambda _future: run())
            return
        if worker.is_running_here:
            worker.run_until(future.done)
        elif (outer := future_callbacks.this_thread.callback) is not None:
            worker.wait_until_next(outer)
        if future_callbacks.is_inside_callback() and future.done():
            run()
            return
        callback, earlier = future_callbacks.register_callback(self, run)
        worker.submit(_nothing, callback, earlier)

    def run_queued_until(self, work: QueuedWork, *, may_block: bool) -> None:
        """Run queued operations until `work` is done, or until another thread has to run them.

        Args:
            may_block: Whether this thread may block in MPI. If it runs a callback it always may, since waiting there
                for the worker would deadlock.
        """
        flight_recorder.refuse_children()
        worker = self._worker
        if worker is None:
            return
        if may_block or worker.is_running_here:
            worker.run_until_done(work)
        else:
            worker.wake_now()

    def start_queued(self) -> None:
        """Let the worker thread start the queued operations now."""
        if self._worker is not None:
            self._worker.wake_now()

    # -- shutdown ------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until all queued operations have run."""
        if self._worker is not None and not self.record.broken:
            self._worker.wait_until_idle()

    def check_open(self) -> None:
        """Check that the group can be used.

        Raises:
            MpicommError: If it is broken or was destroyed.
        """
        self._state.check_open()

    def finish(self) -> bool:
        """Wait until all queued operations have run, and a second for messages; return whether none is in flight."""
        self.drain()
        return self.messages.wait_for_all()

    def advance(self) -> None:
        """Drive the progress of messages in flight."""
        if self._is_usable():
            self.messages.advance()

    def is_sending(self) -> bool:
        """Return whether sent messages are still in flight."""
        self.advance()
        return self.messages.is_sending()

    def close(self) -> None:
        """Finish the queued operations, end the threads and free the communicator (collective)."""
        if not self._state.is_open:
            return
        self._state.is_open = False
        if mpi.is_abandoned() or self.is_stuck():
            mpi.abandon()
            return
        operation = flight_recorder.note(self.record, "destroy", None, 0, None, is_message=False, is_running=True)
        try:
            self._kept_works.clear()
            if self._worker is not None:
                self._worker.stop()
            self.messages.stop()
            if not self.messages.wait_for_all():
                self.messages.abandon()
                self._keeps_communicator = True
            self.algorithms.close()
            if not self._keeps_communicator:
                mpi.free(self.comm)
        finally:
            operation.finish()
            self.record.is_closed = True

    def abort(self) -> None:
        """Abort the group without waiting for other ranks; operations in progress may never complete."""
        # 1. mark the group, here and on the other ranks
        if not self._state.is_open:
            return
        self._state.is_open = False
        self._state.break_by("it was aborted")
        is_revoked = mpi.revoke(self.comm)
        self.algorithms.revoke()
        # 2. fail the queued operations and the in-flight messages
        self.messages.stop()
        error = MpicommError(f"group {self.record.name} was aborted before the operation completed.\nEnd the job.")
        if self._worker is not None:
            self._worker.give_up(error)
        if not self._is_at_rest():
            mpi.abandon()
        self.messages.give_up(error, is_revoked=is_revoked)

    def end(self, error: MpicommError, *, revokes: bool) -> None:
        """End the group without communication: some of its ranks have failed, or take no further part.

        Args:
            error: The error of operations that have not completed.
            revokes: Whether calls in progress end, on all ranks; MPI must tolerate failures.
        """
        if not self._state.is_open:
            return
        self._state.is_open = False
        self._kept_works.clear()
        # 1. fail the queued operations and the messages in flight
        if revokes:
            mpi.revoke(self.comm)
            self.algorithms.revoke()
        self.messages.stop()
        if self._worker is not None:
            self._worker.give_up(error)
        self.messages.give_up(error, is_revoked=revokes)
        # 2. release the shared memory, unless a thread still uses it
        worker = self._worker
        if worker is None or mpi.poll(lambda: worker.is_idle, _LATE_SECONDS):
            self.algorithms.close()  # the communicator is kept: other ranks may still send messages on it
        elif not revokes:
            mpi.abandon()

    def is_stuck(self) -> bool:
        """Return whether an operation of a broken group is still not complete, after a grace period."""
        return bool(self.record.broken) and not mpi.poll(self._is_at_rest, _LATE_SECONDS)

    def _is_at_rest(self) -> bool:
        """Return whether no MPI call of a broken group is pending."""
        return not self._state.has_outstanding() and (self._worker is None or self._worker.is_idle)

    def _runs_here(self, is_async: bool) -> bool:
        thread, worker = future_callbacks.this_thread, self._worker
        if future_callbacks.message_threads:
            future_callbacks.refuse_in_messages()
        if thread.runs_queue and worker is not None and worker.is_running_here:
            return True  # a callback: queueing an operation and waiting for it would deadlock
        if thread.callback is not None:
            if worker is not None:
                worker.wait_until_next(thread.callback)
            return True
        return not is_async and (worker is None or worker.is_idle) and not future_callbacks.before_next_call(self)

    def _get_worker(self) -> Worker:
        with self._starting_worker:
            if self._worker is None:
                require_threads()
                self._worker = Worker(f"mpicomm-worker-{self.record.name}", self._jobs)
            return self._worker


def _spanned(call: Callable[[], None], span: Any) -> Callable[[], None]:
    """Return a call that ends a span of torch's profiler."""

    def ending() -> None:
        try:
            call()
        finally:
            torch_internals.end_event(span)

    return ending


def _in_inference_mode(call: Callable[[], None]) -> None:
    """Run a call that may write inference tensors, on any thread."""
    with torch.inference_mode():
        call()


def _nothing() -> None:
    """Do nothing: the call of a barrier, which only synchronises, and of a queued callback."""
