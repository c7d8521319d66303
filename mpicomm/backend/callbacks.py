"""The order of callbacks of asynchronous collectives, which may call operations themselves.

All ranks must call the operations of a group in the same order, but an operation does not end at the same time on all.
So a callback does not run when its operation ends. It runs at the place where a thread of the program added it: after
what that thread called before, on any group, and before what it calls later. A callback waits in the queue of its own
group; an operation of another group, and a callback of its operations, first waits for the callbacks that the same
thread added before it. Threads have no order among them: they use groups of their own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from mpicomm.errors import MpicommError

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_pending: list[Callback] = []
"""Those that have not run, of all groups and threads, in the order in which they were added."""
_message_threads: list[None] = []
"""One entry for each thread that runs callbacks of messages now."""
_thread = threading.local()


class Queue(Protocol):
    """Where the operations of one group wait for their turn."""

    def add_callback(self, future: OrderedFuture, run: Callable[[], None]) -> None:
        """Run a callback of an operation's future behind what is queued."""


class Callback:
    """A callback that waits in its group's queue."""

    def __init__(self, queue: Any, run: Callable[[], None]) -> None:
        self.queue = queue
        self.thread = threading.get_ident()
        """The thread that added it."""

        self._run = run
        self.has_ended = threading.Event()

    def finish(self, error: BaseException | None) -> None:  # noqa: ARG002  its future has it
        """Run the callback, also where the group was aborted; called on the thread that runs the queue."""
        outer, _thread.callback = current(), self
        try:
            self._run()
        finally:
            _thread.callback = outer
            with _lock:
                _pending.remove(self)
            self.has_ended.set()


class OrderedFuture(torch.futures.Future[Any]):
    """A future whose callbacks run in the order in which the program added them.

    C++ code, and what `torch.futures.collect_all` returns, do not pass here: their callbacks run when the future ends.
    """

    def __init__(self, queue: Queue, devices: list[int | str | torch.device]) -> None:
        super().__init__(devices=devices)
        self._queue = queue
        self._devices = devices

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> OrderedFuture:
        """Add a callback, and return a future of its result."""
        result = OrderedFuture(self._queue, self._devices)

        def run() -> None:
            try:
                result.set_result(callback(self))
            except Exception as error:  # noqa: BLE001  raised where the result is asked for
                result.set_exception(error)

        self._queue.add_callback(self, run)
        return result

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Add a callback; an error in it is logged."""

        def run() -> None:
            try:
                callback(self)
            except Exception:  # noqa: BLE001  nobody waits for it
                _log.exception("a callback of an asynchronous operation failed")

        self._queue.add_callback(self, run)


def all_of(futures: Sequence[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
    """Return a future of the values of several, of one group; its callbacks have an order if those of each have."""
    if len(futures) == 1:
        return futures[0]
    if futures and all(isinstance(each, OrderedFuture) for each in futures):
        return futures[-1].then(lambda _: [each.value() for each in futures])  # the last in the queue ends last
    return torch.futures.collect_all(list(futures))


def enter_queue_thread() -> None:
    """Note that this thread runs a group's queue: what it calls is not called by the program, but by a callback."""
    _thread.runs_queue = True


@contextlib.contextmanager
def of_messages() -> Iterator[None]:
    """Run callbacks of messages, which end in no order, on a thread that runs no others."""
    _thread.runs_messages = True
    _message_threads.append(None)
    try:
        yield
    finally:
        _message_threads.pop()


def refuse_in_messages() -> None:
    """Check that a collective is not called by a message's callback.

    Raises:
        MpicommError: If it is: its place among the collectives would differ from rank to rank.
    """
    if getattr(_thread, "runs_messages", False):
        raise MpicommError(
            "a callback of a message (isend or irecv) called a collective, whose order would differ between ranks.\n"
            "Call wait() on the message, then the collective."
        )


def is_inside_callback() -> bool:
    """Tell whether this thread runs callbacks of a group's operations."""
    return current() is not None or getattr(_thread, "runs_queue", False)


def current() -> Callback | None:
    """Return the callback that runs on this thread."""
    return getattr(_thread, "callback", None)


def add(queue: Any, run: Callable[[], None]) -> tuple[Callback, list[Callback]]:
    """Return a new callback, and those of other groups that this thread added before."""
    callback = Callback(queue, run)
    with _lock:
        earlier = _of_others(queue)
        _pending.append(callback)
    return callback, earlier


def before(queue: Any) -> list[Callback]:
    """Return the callbacks of other groups that come before what this thread calls now."""
    if not _pending or is_inside_callback():
        return []
    with _lock:
        return _of_others(queue)


def _of_others(queue: Any) -> list[Callback]:
    thread = threading.get_ident()
    return [each for each in _pending if each.thread == thread and each.queue is not queue]


def may_matter() -> bool:
    """Tell whether some callback has not run yet, or one of a message runs."""
    return bool(_pending or _message_threads)
