"""Complete implementations of torch's `Work`, the handle of a started operation."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.arguments import Deadline, seconds_of
from mpicomm.backend import dtypes, torch_internals
from mpicomm.backend.future_callbacks import OrderedFuture, Queue, all_of
from mpicomm.errors import MpicommError
from mpicomm.watchdog import flight_recorder, rank_failures
from mpicomm.watchdog.flight_recorder import Operation

if TYPE_CHECKING:
    from mpi4py.MPI import Request

Timeout = datetime.timedelta | Deadline | None
"""The argument of `wait`: torch's timeout, or a deadline that several works share."""

_LEAST_SECONDS = 1e-3  # torch treats a timeout of zero as no timeout


class OperationQueue(Queue, Protocol):
    """The interface of a group's executor that the works of its collectives use."""

    def run_queued_until(self, work: QueuedWork, *, may_block: bool) -> None:
        """Run the queued operations until `work` is done, or until another thread has to run them."""

    def start_queued(self) -> None:
        """Let the worker thread start the queued operations now."""

    def time_out(self, operation: Operation, seconds: float) -> TimeoutError:
        """Return the error of a collective that timed out; the group becomes unusable."""


class MessageKeeper(Protocol):
    """The interface of a group's messages that their works use."""

    @property
    def timeout_of_messages(self) -> float | None:
        """Seconds until waiting for a message raises TimeoutError; None if the watchdog aborts the job instead."""

    def watch(self, work: MessageWork) -> None:
        """Complete the future of `work` when its message has completed."""

    def forget(self, work: MessageWork) -> None:
        """Release `work`, whose message has completed."""


class _Work(dist.Work):
    """The methods that all kinds of work share."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation writes."""
        return self.tensors

    def is_success(self) -> bool:
        """Return whether the operation has completed without an error."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """Wait for completion; the results are then in memory, so that no stream needs to wait for them."""
        self.wait()

    def source_rank(self) -> int:
        """Return the group rank of the sender of a received message.

        Raises:
            MpicommError: If the operation is not a receive, or has not completed.
        """
        raise MpicommError(
            "source_rank() is available only for a completed receive.\nCall it after wait(), on the work of a receive."
        )

    def _source_rank(self) -> int:
        return self.source_rank()


class CompletedWork(_Work):
    """An operation that completed before its call returned."""

    __init__ = dist.Work.__init__  # for speed: most operations create this class, by `of`

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> CompletedWork:
        """Return the work of an operation that wrote these tensors."""
        work = cls()
        work.tensors = tensors
        return work

    def wait(self, timeout: Timeout = None) -> bool:  # noqa: ARG002  torch's signature
        """Return immediately: the operation has completed."""
        return True

    def is_completed(self) -> bool:
        """Return True: the operation has completed."""
        return True

    def exception(self) -> None:
        """Return None: a synchronous operation raises its error in the call."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is already complete."""
        return torch_internals.completed_future(self.tensors)


class QueuedWork(_Work):
    """An operation in the queue of the group's worker thread."""

    def __init__(self, tensors: list[torch.Tensor], operation: Operation, queue: OperationQueue) -> None:
        super().__init__(tensors)
        self._operation = operation
        self._queue = queue
        self._lock = threading.RLock()  # guards the completion and the future, also against signal handlers
        self._done = False
        self._error: BaseException | None = None
        self._future: OrderedFuture | None = None  # created when it is needed: this takes microseconds

    @property
    def has_begun(self) -> bool:
        """Whether the operation has begun."""
        return self._operation.start is not None

    def finish(self, error: BaseException | None) -> None:
        """Complete the work, on the thread that ran the operation; a second call completes the rest."""
        with self._lock:
            self._error = error
            self._done = True
            future = self._future
        if future is not None and not future.done():
            self._complete(future)

    def _complete(self, future: OrderedFuture) -> None:
        if self._error is None:
            future.set_result(self.tensors)
        else:
            future.set_exception(self._failure())

    def _failure(self) -> Exception:
        """Return the error that wait() raises."""
        if isinstance(self._error, Exception):
            return self._error
        # Of a signal handler on the thread that ran the operation; futures hold no such exceptions.
        what = f"the operation was interrupted by {type(self._error).__name__}"
        return MpicommError(f"{what}.\nEnd the job: the ranks may be out of step.")

    def wait(self, timeout: Timeout = None) -> bool:
        """Wait until the operation has completed.

        Raises:
            TimeoutError: If it has not completed after `timeout`; the group is then unusable.
        """
        deadline = _deadline(timeout)
        self._queue.run_queued_until(self, may_block=deadline is None)
        if deadline is not None and not mpi.poll(self.is_completed, deadline):
            raise self._queue.time_out(self._operation, deadline.seconds)
        if not self.is_completed():
            # torch's future releases the GIL while it waits; the worker needs the GIL to complete the operation.
            future = self.get_future()
            try:
                future.wait()
            except Exception:
                if not self.is_completed() or self._error is None:  # a signal handler's; that of the work follows
                    raise
        if self._error is not None:
            raise self._failure()
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has completed."""
        future = self._future  # completes later than the operation
        return self._done if future is None else future.done()

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None if it has not failed."""
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future that completes when the operation does; its callbacks run in the group's queue."""
        if self._future is None:
            made = OrderedFuture(self._queue, self.tensors)
            with self._lock:
                if self._future is None:
                    if self._done:
                        self._complete(made)  # before another thread can get it
                    self._future = made
            self._queue.start_queued()  # C++ code waits for futures, and does not run operations
        return self._future


class MessageWork(_Work):
    """A point-to-point message in flight: an MPI request that the waiting thread or the poller progresses."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        request: Request,
        memory: torch.Tensor,
        operation: Operation,
        keeper: MessageKeeper,
        arrived: Callable[[Any], None] | None = None,
    ) -> None:
        """Manage an MPI request.

        Args:
            memory: The memory that MPI reads or writes; kept alive until the message has completed.
            keeper: Keeps this work alive until the message has completed, and completes the future if one is requested.
            arrived: Called with the MPI status of a received message; None for a send.
        """
        super().__init__(tensors)
        self._request = request
        self._memory: torch.Tensor | None = memory
        self._operation = operation
        self._keeper = keeper
        self._arrived = arrived
        self.is_sent = arrived is None
        self._status = mpi.api().Status()
        self._lock = threading.Lock()  # MPI forbids two threads to complete one request
        self._asking = threading.Lock()  # guards the creation of the future
        self._done = False
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: Timeout = None) -> bool:
        """Wait until the message is sent or received.

        Raises:
            TimeoutError: If it has not completed after `timeout`; it remains in flight.
            RuntimeError: If the received message does not fit the tensor.
        """
        if not self._done:
            flight_recorder.refuse_children()
            self._operation.begin()
            try:
                self._wait(_deadline(timeout) or _deadline(self._keeper.timeout_of_messages))
            finally:
                self._operation.pause()
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, deadline: Deadline | None) -> None:
        if deadline is not None:
            if not mpi.poll(self.is_completed, deadline):
                raise self._late(deadline.seconds)
        elif self._future is not None:
            self._future.wait()
        else:
            with self._lock:
                if not self._done:
                    self._settle(lambda: self._request.Wait(self._status))

    def is_completed(self) -> bool:
        """Return whether the message has completed; each call progresses it."""
        if not self._done:
            flight_recorder.refuse_children()
        if self._done or not self._lock.acquire(blocking=False):
            return self._done
        try:
            if not self._done:
                self._settle(lambda: self._request.Test(self._status))
            return self._done
        finally:
            self._lock.release()

    def give_up(self, error: Exception) -> None:
        """Complete with an error, since the message may never complete; not while another thread is in MPI with it."""
        if self._lock.acquire(blocking=False):
            if not self._done:
                self._error, self._done = error, True
            self._lock.release()

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None if it has not failed."""
        return self._error

    def source_rank(self) -> int:
        """Return the group rank of the sender of a received message.

        Raises:
            MpicommError: If the operation is not a receive, or has not completed.
        """
        if self._arrived is None or not self._done:
            return super().source_rank()
        return self._status.source

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with the message; the group's poller thread progresses it."""
        with self._asking:  # not self._lock, which a waiting thread holds until the message has completed
            if self._future is None:
                self._future = torch_internals.future_of(self.tensors)
                if self._done:
                    self.finish()
                else:
                    self._keeper.watch(self)
            return self._future

    def finish(self) -> None:
        """Complete the future; its callbacks run on the calling thread, that of the poller."""
        assert self._future is not None
        error = self._error
        if not self._done:
            error = MpicommError(
                f"the group was destroyed before {self._what()} completed.\n"
                f"Call wait() on its work before you destroy the group."
            )
        if error is None:
            self._future.set_result(self.tensors)
        else:
            self._future.set_exception(error)

    def _late(self, seconds: float) -> TimeoutError:
        partners = [rank for rank in self._operation.needs if rank != dist.get_rank()]
        partner = f"rank {partners[0]}" if len(partners) == 1 else "any other rank"
        return TimeoutError(
            f"{self._what()} timed out after {seconds:g} s, waiting for {partner}.\n"
            f"Wait longer (the message remains in flight), or call mpicomm.dump_flight_recorder() on "
            f"{partner} to see its last operations."
        )

    def _what(self) -> str:
        tensor = self.tensors[0]
        direction = "send" if self._arrived is None else "recv"
        return f"{direction} of {dtypes.short(tensor.dtype)}{list(tensor.shape)}"

    def _settle(self, complete: Callable[[], bool]) -> None:
        """Complete the request if it is done; the caller holds the lock."""
        try:
            if not complete():
                return
            if self._arrived is not None:
                self._arrived(self._status)
        except mpi.api().Exception as error:
            self._error = rank_failures.error_after(error) or RuntimeError(
                f"{self._what()} failed: {error}.\nCheck that both ranks pass the same size."
            )
        except Exception as error:  # noqa: BLE001  wait() raises it, on its caller's thread
            self._error = error
        self._memory = None
        self._done = True
        self._operation.finish()
        self._keeper.forget(self)


class JointWork(_Work):
    """One work for several operations."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__([])
        self._works = works

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operations write."""
        return [tensor for work in self._works for tensor in work.result()]

    def wait(self, timeout: Timeout = None) -> bool:
        """Wait until all works have completed.

        Raises:
            TimeoutError: If a work has not completed after `timeout`.
        """
        deadline = _deadline(timeout)
        return all(_wait(work, deadline) for work in self._works)

    def is_completed(self) -> bool:
        """Return whether all works have completed."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the error of the first work that failed, or None."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes when all works have completed."""

        def result(ended: torch.futures.Future[Any]) -> list[torch.Tensor]:
            ended.value()  # raises the error of the first work that failed
            return self.result()

        return all_of([work.get_future() for work in self._works]).then(result)


class WorkBatch(threading.local):
    """The works of the operations that this thread has called in an open coalescing manager."""

    works: list[dist.Work] | None = None

    def start(self) -> None:
        """Collect the works of later operations."""
        self.works = []

    def add(self, work: dist.Work) -> None:
        """Add a work, if a batch is open."""
        if self.works is not None:
            self.works.append(work)

    def end(self) -> JointWork:
        """Return one work for the operations that did not complete within their calls."""
        works, self.works = self.works, None
        return JointWork(works or [])


# A wait() in compiled code may run operations.
for _kind in (_Work, CompletedWork, QueuedWork, MessageWork, JointWork):
    torch_internals.hide_from_compiler(_kind)


def _wait(work: dist.Work, deadline: Deadline | None) -> bool:
    """Wait for a work; an inner backend's work accepts timeouts, but no deadlines."""
    if deadline is None:
        return work.wait()
    if isinstance(work, _Work):  # takes a deadline too
        return work.wait(deadline)  # type: ignore[arg-type]
    return work.wait(datetime.timedelta(seconds=max(deadline.count_down(), _LEAST_SECONDS)))


def _deadline(timeout: Timeout | float) -> Deadline | None:
    """Return the deadline of a wait; torch uses a timeout of zero or less for no timeout."""
    if timeout is None or isinstance(timeout, Deadline):
        return timeout
    seconds = seconds_of(timeout)
    return Deadline(seconds) if seconds > 0 else None
