"""Complete implementations of torch's `Work`, the handle of a started operation."""

from __future__ import annotations

import datetime
import threading
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mpicomm import mpi, torch_internals
from mpicomm.arguments import Deadline, seconds_of
from mpicomm.backend.execution.future_callbacks import OrderedFuture, Queue, all_of
from mpicomm.errors import MpicommError
from mpicomm.recorder.flight_recorder import Operation

WaitTimeout = datetime.timedelta | Deadline | None
"""The argument of `wait`: torch's timeout, or a deadline that several works share."""

_SHORTEST_TIMEOUT_SECONDS = 1e-3  # torch treats a timeout of zero as no timeout


class OperationQueue(Queue, Protocol):
    """The interface of a group's executor that the works of its collectives use."""

    def run_queued_until(self, work: QueuedWork, *, may_block: bool) -> None:
        """Run the queued operations until `work` is done, or until another thread has to run them."""

    def start_queued(self) -> None:
        """Let the worker thread start the queued operations now."""

    def time_out(self, operation: Operation, seconds: float) -> TimeoutError:
        """Return the error of a collective that timed out; the group becomes unusable."""


class BackendWork(dist.Work):
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


class CompletedWork(BackendWork):
    """An operation that completed before its call returned."""

    __init__ = dist.Work.__init__  # for speed: most operations create this class, by `of`

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> CompletedWork:
        """Return the work of an operation that wrote these tensors."""
        work = cls()
        work.tensors = tensors
        return work

    def wait(self, timeout: WaitTimeout = None) -> bool:  # noqa: ARG002  torch's signature
        """Return immediately: the operation has completed."""
        return True

    def is_completed(self) -> bool:
        """Return True: the operation has completed."""
        return True

    def exception(self) -> None:
        """Return None: a synchronous operation raises its error in the call."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is already complete."""
        future = torch_internals.future_of(self.tensors)
        future.set_result(self.tensors)
        return future


class EarlyWork(CompletedWork):
    """An asynchronous operation that completed before its call returned; the extension module sets its attributes."""

    queue: Queue
    _future: OrderedFuture | None = None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is already complete; its callbacks run in the group's queue."""
        if self._future is None:
            made = OrderedFuture(self.queue, self.tensors)
            made.set_result(self.tensors)
            self._future = made
        return self._future


class QueuedWork(BackendWork):
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
        message = f"the operation was interrupted by {type(self._error).__name__}"
        return MpicommError(f"{message}.\nEnd the job: the ranks may be out of step.")

    def wait(self, timeout: WaitTimeout = None) -> bool:
        """Wait until the operation has completed.

        Raises:
            TimeoutError: If it has not completed after `timeout`; the group is then unusable.
        """
        deadline = deadline_of(timeout)
        self._queue.run_queued_until(self, may_block=deadline is None)  # refuses forked children first
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


class JointWork(BackendWork):
    """One work for several operations."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__([])
        self._works = works

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operations write."""
        return [tensor for work in self._works for tensor in work.result()]

    def wait(self, timeout: WaitTimeout = None) -> bool:
        """Wait until all works have completed.

        Raises:
            TimeoutError: If a work has not completed after `timeout`.
        """
        deadline = deadline_of(timeout)
        return all(_wait_for_work(work, deadline) for work in self._works)

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


def _wait_for_work(work: dist.Work, deadline: Deadline | None) -> bool:
    """Wait for a work; an inner backend's work accepts timeouts, but no deadlines."""
    if deadline is None:
        return work.wait()
    if isinstance(work, BackendWork):  # takes a deadline too
        return work.wait(deadline)  # type: ignore[arg-type]
    return work.wait(datetime.timedelta(seconds=max(deadline.count_down(), _SHORTEST_TIMEOUT_SECONDS)))


def deadline_of(timeout: WaitTimeout | float) -> Deadline | None:
    """Return the deadline of a wait; torch uses a timeout of zero or less for no timeout."""
    if timeout is None or isinstance(timeout, Deadline):
        return timeout
    seconds = seconds_of(timeout)
    return Deadline(seconds) if seconds > 0 else None


# A wait() in compiled code may run operations.
for _kind in (BackendWork, CompletedWork, EarlyWork, QueuedWork, JointWork):
    torch_internals.hide_from_compiler(_kind)
