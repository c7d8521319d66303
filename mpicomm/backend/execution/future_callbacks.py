"""The execution order of callbacks of asynchronous collectives; a callback may itself call operations.

All ranks must call the operations of a group in the same order, but an operation completes at different times on
different ranks. Therefore a callback does not run on completion of its operation. It runs in program order of the
thread that added it: after the earlier calls of that thread, on any group, and before its later calls. A callback
waits in the queue of its own group. An operation of another group, and a callback of such an operation, first waits
for the callbacks that the same thread added earlier. Callbacks of different threads are not ordered: the threads must
use different groups.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from mpicomm import torch_internals
from mpicomm.backend.execution import backward_errors
from mpicomm.devices import accelerator
from mpicomm.errors import MpicommError

_log = logging.getLogger(__name__)
_lock = threading.Lock()
pending: list[FutureCallback] = []
"""The callbacks that have not run, of all groups and threads, in the order of registration."""
message_threads: list[int] = []
"""The threads that are running callbacks of point-to-point messages: of all groups, each of which has one."""


class _Thread(threading.local):
    """The state of one thread."""

    callback: FutureCallback | None = None
    """The callback that is running on it."""

    runs_queue = False
    """Whether it runs a group's queue: calls on it then come from callbacks, not from the program."""


this_thread = _Thread()


class Queue(Protocol):
    """The queue of operations of one group."""

    def add_callback(self, future: OrderedFuture, run: Callable[[], None]) -> None:
        """Queue a callback of an operation's future behind the operations that are already queued."""


class FutureCallback:
    """A callback that waits in its group's queue."""

    def __init__(self, queue: Any, run: Callable[[], None]) -> None:
        self.queue = queue
        self.thread = threading.get_ident()
        """The thread that added the callback."""

        self._run = run
        self.has_begun = False
        """Always: the job's call does nothing, and `finish` runs the callback once."""

        self.has_ended = threading.Event()

    def finish(self, error: BaseException | None) -> None:  # noqa: ARG002  the future holds it
        """Run the callback, on the thread that runs the queue; also runs if the group was aborted."""
        outer = this_thread.callback
        try:
            this_thread.callback = self
            run, self._run = self._run, _nothing
            run()
        finally:
            this_thread.callback = outer
            with _lock:
                if self in pending:
                    pending.remove(self)
            self.has_ended.set()


class OrderedFuture(torch.futures.Future[Any]):
    """A future whose callbacks run in the order in which the program added them.

    Callbacks of C++ code and of `torch.futures.collect_all` bypass this class and run when the future completes.
    """

    def __init__(self, queue: Queue, tensors: Sequence[torch.Tensor]) -> None:
        """Create a future of an operation.

        Args:
            tensors: The tensors that the operation writes.
        """
        super().__init__(devices=[*accelerator.devices_of(tensors)])
        self._queue = queue
        self._tensors = tensors
        self._passes = backward_errors.running_passes() if torch_internals.is_in_backward() else None

    def set_exception(self, error: Exception) -> None:
        """Complete the future with an error; a backward pass in which it was created raises the error, too."""
        if self._passes is None:
            super().set_exception(error)
            return
        for errors in self._passes:
            errors.append(error)
        torch_internals.set_error(self, error, self._tensors)

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> OrderedFuture:
        """Add a callback and return a future of its result."""
        result = OrderedFuture(self._queue, self._tensors)

        def run() -> None:
            try:
                result.set_result(callback(self))
            except Exception as error:  # noqa: BLE001  raised by wait() or value() of the result
                result.set_exception(error)

        self._queue.add_callback(self, run)
        return result

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Add a callback; an exception in it is logged."""

        def run() -> None:
            try:
                callback(self)
            except Exception:  # noqa: BLE001  the result has no future
                _log.exception("a callback of an asynchronous operation failed")

        self._queue.add_callback(self, run)


def all_of(futures: Sequence[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
    """Return a future of the values of several futures of one group.

    Its callbacks run in program order if all of the futures are `OrderedFuture`.
    """
    if len(futures) == 1:
        return futures[0]
    are_in_order = futures and all(isinstance(future, OrderedFuture) for future in futures)
    # The queue completes futures in order.
    last = futures[-1] if are_in_order else torch.futures.collect_all(list(futures))
    return last.then(lambda _: [future.value() for future in futures])


@contextlib.contextmanager
def running_message_callbacks() -> Iterator[None]:
    """Mark this thread as running callbacks of messages and no others; messages complete in any order."""
    message_threads.append(threading.get_ident())
    try:
        yield
    finally:
        message_threads.remove(threading.get_ident())


def refuse_in_messages() -> None:
    """Check that a callback of a message does not call a collective operation.

    Raises:
        MpicommError: If it does: the order of the group's collectives would differ between ranks.
    """
    if threading.get_ident() in message_threads:
        raise MpicommError(
            "a callback of a message (isend or irecv) called a collective operation, "
            "whose order would differ between ranks.\n"
            "Call wait() on the work of the message, then call the collective operation."
        )


def is_inside_callback() -> bool:
    """Return whether this thread is running a callback of a group's operation, or is a group's worker."""
    return this_thread.callback is not None or this_thread.runs_queue


def register_callback(queue: Any, run: Callable[[], None]) -> tuple[FutureCallback, list[FutureCallback]]:
    """Register a callback; return it and the pending callbacks of other groups that this thread added earlier."""
    callback = FutureCallback(queue, run)
    with _lock:
        earlier = _of_others(queue)
        pending.append(callback)
    return callback, earlier


def before_next_call(queue: Any) -> list[FutureCallback]:
    """Return the pending callbacks of other groups that must run before the next call of this thread."""
    if not pending or is_inside_callback():
        return []
    with _lock:
        return _of_others(queue)


def _of_others(queue: Any) -> list[FutureCallback]:
    thread = threading.get_ident()
    return [callback for callback in pending if callback.thread == thread and callback.queue is not queue]


def _nothing() -> None:
    """Do nothing, in place of a callback that has run."""
