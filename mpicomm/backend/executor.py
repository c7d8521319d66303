"""Who runs a group's operations, and when: on the caller's thread, on the group's worker, or in MPI's own time.

A synchronous collective is one blocking call on the caller's thread; an asynchronous one is queued for the group's
worker, and from then on later collectives queue behind it until the worker is idle again, so that every rank's calls
keep the order in which they were made. Messages are MPI requests that whoever waits drives to their end.
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
from mpicomm.backend.agreement import Agreement
from mpicomm.backend.buffers import Tensors
from mpicomm.backend.callbacks import OrderedFuture
from mpicomm.backend.work import CompletedWork, MessageWork, QueuedWork
from mpicomm.backend.worker_thread import Poller, Worker
from mpicomm.errors import MpicommError
from mpicomm.settings import Settings
from mpicomm.watchdog import agent, flight_recorder, hang_report
from mpicomm.watchdog.flight_recorder import Operation

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

_REAP_ABOVE = 32  # messages in flight, above which the finished ones are looked for
_LAST_MESSAGES_SECONDS = 1.0
_LATE_SECONDS = 1.0  # in which an operation that did not end in time may end after all, when its group is destroyed

_NO_TIME = datetime.timedelta(0)
_KEPT, _FEW = 64, 64  # works that live on, and the most elements that their tensors have

_abandoned: list[MessageWork] = []
"""Messages of destroyed groups: MPI may still read and write their memory."""


class CallOptions(Protocol):
    """What torch says of a call beside its tensors; all its classes of options have this."""

    asyncOp: bool  # noqa: N815  torch's name
    timeout: datetime.timedelta
    """Zero or less for the group's own."""


class Executor:
    """Runs the operations of one group, on the group's own communicator."""

    def __init__(
        self, comm: Intracomm, record: flight_recorder.Group, settings: Settings, on_close: Callable[[], None]
    ) -> None:
        """Prepare to run operations.

        Args:
            let_go: Called when the group is taken down, before its communicator is freed (collective).
        """
        self._comm = comm
        self._on_close = on_close
        self._record = record
        self._raises_timeouts = settings.raises_timeouts
        self._agreement = Agreement(comm, list(record.ranks)) if settings.compares_calls else None
        self._keeps_communicator = False
        self._outstanding: list[Request] = []  # barriers that did not end in time; MPI cannot take them back
        self._turn = threading.Lock()  # MPI wants collective calls on one communicator one at a time
        self._try_turn, self.give_turn_back = self._turn.acquire, self._turn.release
        # Whether collectives are run as they are, with nothing before them.
        self._is_simple = self._agreement is None and not self._raises_timeouts
        self._starting = threading.Lock()
        self._worker: Worker | None = None
        self._poller: Poller | None = None
        self._in_flight: set[MessageWork] = set()
        self._reap_at = _REAP_ABOVE
        self._events: dict[MessageWork, Any] = {}  # the profiler's spans of messages in flight
        self.title = "mpicomm"  # how the profiler calls the back end
        self._kept: collections.deque[QueuedWork] = collections.deque(maxlen=_KEPT)
        self._batch = threading.local()  # in `works`, those of what torch's coalescing manager groups on a thread
        self._is_open = True

    @property
    def timeout_of_messages(self) -> float | None:
        """Seconds after which waiting for a message raises TimeoutError; None if the watchdog ends the job instead."""
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
        """Record a collective and start it.

        Args:
            results: What the operation writes here.
            subjects: What all ranks call it with: of equal dtype, and of equal shape unless `any_size`.
            also: What else must be equal on all ranks.
            inputs: What the profiler is told that the operation reads; the subjects if left out.
        """
        self._check_open()
        if results and results[0].is_inference():
            call = _inferring(call)
        if torch_internals.is_profiling():
            call = self._profiled(call, name, subjects if inputs is None else inputs)
        count = subjects[0].numel() if len(subjects) == 1 else sum(each.numel() for each in subjects)
        signature = "" if self._agreement is None else _say(name, subjects, root, also, any_size)
        runs_here = self._runs_here(opts.asyncOp)
        # Above this method are one of the operations's, and two of the face's or one and torch's.
        operation = flight_recorder.note(self._record, name, subjects[0].dtype, count, root, False, runs_here, 4)
        if (timeout := opts.timeout) > _NO_TIME:
            operation.limit = timeout.total_seconds()
        return self._start(
            operation, call, list(results), opts.asyncOp, signature, self._wait_limit(operation), runs_here
        )

    def barrier(self, opts: CallOptions) -> Any:
        """Wait for every rank, for at most the options' timeout, or the group's."""
        self._check_open()
        runs_here = self._runs_here(opts.asyncOp)
        operation = flight_recorder.note(self._record, "barrier", None, 0, None, False, runs_here, 3)
        operation.limit = None  # TimeoutError is raised instead
        seconds = opts.timeout.total_seconds()
        seconds = seconds if seconds > 0 else self._record.timeout
        return self._start(operation, _nothing, [], opts.asyncOp, "barrier", seconds, runs_here)

    def note_own(self, name: str) -> Operation:
        """Record what the caller does with messages of his own, and ends in its own time; it has no number."""
        self._check_open()
        operation = flight_recorder.note(self._record, name, None, 0, None, True, True, 3)
        operation.limit = None
        return operation

    def _profiled(self, call: Callable[[], None], name: str, inputs: Tensors) -> Callable[[], None]:
        """Return a call that ends a span of the profiler, which starts here."""
        event = torch_internals.start_event(f"{self.title}:{name}", inputs)

        def profiled() -> None:
            try:
                call()
            finally:
                torch_internals.end_event(event)

        return profiled

    def _wait_limit(self, operation: Operation) -> float | None:
        """Return how long the ranks wait for each other, interruptibly, before it; None: they go straight into it."""
        if self._raises_timeouts:
            return operation.limit
        return math.inf if self._agreement is not None else None

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
        """Run `call` now, or queue it behind what is queued.

        Args:
            said: What all ranks must agree on, where they compare it.
            wait_limit: Seconds to wait for the other ranks before the call; None to go straight into it.
            runs_here: Whether `call` is to run now.

        Returns:
            The work; finished already if the operation is synchronous.
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
        # Last, since the worker will want the GIL.
        self._get_worker().submit(in_turn, work, callbacks.before(self))
        if not is_async:
            work.wait()
        return work

    def _keep(self, work: QueuedWork) -> None:
        """Let a work live on for a while after its caller has dropped it.

        DDP's join hands one to C++ and drops it; C++ asks it when the next backward pass ends, and would find a work
        without methods if Python's part of it were gone.
        """
        if all(tensor.numel() <= _FEW for tensor in work.result()):
            self._kept.append(work)

    def _run(self, operation: Operation, call: Callable[[], None], signature: str, wait_limit: float | None) -> None:
        """Run a collective in its turn, and note when it ends."""
        try:
            with self._turn:
                if wait_limit is not None:
                    self._wait_for_all(operation, wait_limit)
                if self._agreement is not None:
                    self._agreement.check(signature, operation)
                call()
        except BaseException as error:
            if not getattr(error, "is_everywhere", False):
                self.mark_broken(operation, error)
            raise
        finally:
            operation.finish()

    def mark_broken(self, operation: Operation, error: BaseException) -> None:
        """Note that the group cannot be used any more: the next call of this rank may not match those of the others.

        Args:
            error: What ended the operation on this rank; a signal handler may raise anything between two parts of it.
        """
        if self._record.broken:
            return
        how = f"failed: {error}" if isinstance(error, Exception) else f"was interrupted by {type(error).__name__}"
        self._record.broken = f"{hang_report.operation(operation.describe(0.0))} {how}"
        if (watch := agent.current()) is not None:
            watch.break_group(self._record.name, f"{self._record.broken} on rank {watch.place.rank}")

    def take_turn(self) -> bool:
        """Tell whether the caller may run a collective as it is; if so, it has the turn until it gives that back."""
        worker = self._worker
        if (worker is not None and (worker.is_current_thread or not worker.is_idle)) or callbacks.may_matter():
            return False
        if not self._is_simple or not self._is_open:
            return False
        return not self._record.broken and not torch_internals.is_profiling() and self._try_turn(False)

    def _wait_for_all(self, operation: Operation, seconds: float) -> None:
        """Wait for every rank, interruptibly.

        Raises:
            TimeoutError: If a rank has not come after `seconds`; it names those that have not.
            MpicommError: If another rank did not wait that long.
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
        if self._raises_timeouts:  # from here on nothing interrupts it, and only the watchdog could end it
            operation.limit = limit
            operation.forgive(time.monotonic() - start)

    def time_out(self, operation: Operation, seconds: float) -> TimeoutError:
        """Return the error of a collective that did not end in time; the group cannot be used any more."""
        what = hang_report.operation(operation.describe(0.0))
        self._record.broken = f"{what} did not end within {seconds:g} s"
        operation.limit = None  # the program hears of it here, and may go on: the watchdog must not end the job as well
        watch = agent.current()
        missing, table = watch.missing(operation) if watch is not None else ([], "Another rank has not come to it.")
        operation.pause()
        if watch is not None:
            watch.break_group(self._record.name, f"{self._record.broken} on rank {watch.place.rank}")
        if not missing:
            return TimeoutError(f"{self._record.broken}.\n{table}\nFind out what that rank does.")
        return TimeoutError(
            f"{what}: {len(missing)} of {self._comm.size} ranks did not come within the timeout of {seconds:g} s: "
            f"{hang_report.called(missing)}.\n{table}\n"
            f"Look at what they do there, or allow more time. The group cannot be used any more."
        )

    def add_callback(self, future: OrderedFuture, run: Callable[[], None]) -> None:
        """Run a callback of an operation's future behind what is queued."""
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

    def run_what_is_before(self, work: QueuedWork) -> None:
        """On the worker's own thread, where waiting would wait for itself, run what is queued until `work` is done."""
        flight_recorder.refuse_children()
        if self._worker is not None and self._worker.is_current_thread:
            self._worker.run_until(work.is_completed)

    # -- messages ------------------------------------------------------------------------------------------------

    def note_message(self, name: str, tensor: torch.Tensor, peer: int | None) -> Operation:
        """Record a message."""
        self._check_open()
        operation = flight_recorder.note(self._record, name, tensor.dtype, tensor.numel(), peer, True, False, 3)
        if self._raises_timeouts:
            operation.limit = None
        return operation

    def track(self, name: str, work: MessageWork) -> MessageWork:
        """Keep a message's memory alive until it is through, whatever the caller does with the handle."""
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
        """See to it that a message gets on while its rank does something else."""
        poller = self._poller
        if (poller is not None and not poller.is_idle) or work.is_completed() or not mpi.serves_threads():
            return
        self._get_poller().rouse()

    def watch(self, work: MessageWork) -> None:
        """Finish a message whose future somebody holds when it is through."""
        self._get_poller().watch(work)

    def forget(self, work: MessageWork) -> None:
        """Let go of a message that is through."""
        self._in_flight.discard(work)
        if self._events:
            torch_internals.end_event(self._events.pop(work, None))

    # -- batches -------------------------------------------------------------------------------------------------

    def start_batch(self) -> None:
        """Remember the works of what is called from now on."""
        self._batch.works = []

    def end_batch(self) -> list[Any]:
        """Return the works since `start_batch` of what had not ended within its call."""
        return self._batch.__dict__.pop("works", [])

    def remember(self, work: Any) -> None:
        """Take a work into the batch, if one is being put together."""
        works = self._batch.__dict__.get("works")
        if works is not None:
            works.append(work)

    # -- the end -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until what is queued has run."""
        if self._worker is not None and not self._record.broken:
            self._worker.wait_until_idle()

    def advance(self) -> None:
        """Let messages that are on their way make progress."""
        if self._is_open and not self._record.broken:
            self._reap()

    def is_sending(self) -> bool:
        """Tell whether messages that were sent are on their way."""
        self.advance()
        return any(work.is_sent for work in list(self._in_flight))

    def close(self) -> None:
        """Finish what is queued, end the threads and free the communicator (collective)."""
        if not self._is_open:
            return
        self._is_open = False
        if mpi.is_abandoned() or self.is_stuck():
            mpi.abandon()
            return
        operation = flight_recorder.note(self._record, "destroy", None, 0, None, False, True, 2)
        try:
            self._take_down()
        finally:
            operation.finish()
            self._record.is_closed = True

    def abort(self) -> None:
        """Give the group up without waiting for anybody; what is on its way may never end."""
        if not self._is_open:
            return
        self._is_open = False
        self._record.broken = self._record.broken or "it was aborted"
        if (watch := agent.current()) is not None:
            watch.break_group(self._record.name, f"it was aborted on rank {watch.place.rank}")
        if self._poller is not None:
            self._poller.stop()
        error = MpicommError(f"group {self._record.name} was aborted before the operation ended.\nEnd the job.")
        if self._worker is not None:
            self._worker.give_up(error)
        if self._in_flight or not self._is_at_rest():
            mpi.abandon()
        for message in list(self._in_flight):
            message.give_up(error)
        _abandoned.extend(self._in_flight)  # MPI may still read and write their memory

    def is_stuck(self) -> bool:
        """Tell whether an operation that did not end in time has not ended yet, and may never."""
        return bool(self._record.broken) and not mpi.poll(self._is_at_rest, _LATE_SECONDS)

    def keep_communicator(self) -> None:
        """Never free the communicator: a message or a receive that nobody matched is left on it.

        MPICH 4.0 gives the context of a freed communicator to the next one, and the two match across them (seen in
        4.0.2, not in 5.0).
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
        """Tell whether MPI has nothing left to do for a group that is broken: the late ranks may have come."""
        self._outstanding = [request for request in self._outstanding if not request.Test()]
        return not self._outstanding and (self._worker is None or self._worker.is_idle)

    def _runs_here(self, is_async: bool) -> bool:
        callbacks.refuse_in_messages()
        worker = self._worker
        if worker is not None and worker.is_current_thread:
            return True  # a callback that queued an operation and waited for it would wait for itself
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
            raise MpicommError(f"group {name} is destroyed.\nMake a new one with torch.distributed.new_group().")

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
        """Look at every message in flight once, and tell whether any is left."""
        self._reap()
        return bool(self._in_flight)

    def _reap(self) -> None:
        for work in list(self._in_flight):
            work.is_completed()  # one that is through makes the operations forget it

    def _finish_messages(self) -> None:
        def all_through() -> bool:
            self._reap()
            return not self._in_flight

        if not mpi.poll(all_through, _LAST_MESSAGES_SECONDS, longest_pause=1e-4):
            warnings.warn(
                f"group {self._record.name} is destroyed with {len(self._in_flight)} messages on their way; "
                f"wait for what isend and irecv return before.",
                stacklevel=4,
            )
            _abandoned.extend(self._in_flight)
            self.keep_communicator()


def _inferring(call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that may write inference tensors, on whatever thread."""

    def inferring() -> None:
        with torch.inference_mode():
            call()

    return inferring


def _nothing() -> None:
    """Do what a barrier does once the ranks have met."""


def _say(name: str, subjects: Tensors, root: int | None, also: str, any_size: bool) -> str:
    """Return what all ranks of a collective must agree on."""
    shown = [dtypes.short(each.dtype) + ("" if any_size else str(list(each.shape))) for each in subjects]
    return " ".join(
        filter(None, [name, also, ", ".join(shown), "" if root is None else f"(root: rank {root} of the group)"])
    )


def _require_threads() -> None:
    if not mpi.serves_threads():
        raise MpicommError(
            "asynchronous operations need an MPI that serves several threads (MPI_THREAD_MULTIPLE), "
            "which this one refused.\nUse async_op=False, or let mpicomm.bootstrap() initialise MPI."
        )
