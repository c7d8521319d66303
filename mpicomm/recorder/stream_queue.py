"""The record of operations that an inner backend, such as NCCL, runs on a stream of the GPU."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from mpicomm.recorder import flight_recorder
from mpicomm.recorder.flight_recorder import Group, Operation

_HELD_ENDS = 16  # the most operations that a queue polls: the work of each may keep its tensors alive
_queues: list[StreamQueue] = []


class StreamQueue:
    """The operations that an inner backend queues on a GPU's stream, where they run one after the other.

    Only the oldest pending operation runs, so the time in which the others are queued does not count towards their
    timeouts. The queue polls a few of the pending operations, not all: their works may keep tensors alive.
    """

    def __init__(self, group: Group, prepare_thread: Callable[[Any], None]) -> None:
        """Create the queue.

        Args:
            prepare_thread: Called with the GPU on a thread before it polls: by default, a query would end the capture
                of a graph in another thread, and the release of an event would create a context on the first GPU.
        """
        self.device: Any = None
        """The GPU of the last operation; None before the first one."""

        self._group = group
        self._prepare_thread = prepare_thread
        self._lock = threading.Lock()
        self._open: collections.deque[Operation] = collections.deque()
        self._held: list[tuple[Operation, Callable[[], bool]]] = []
        _queues.append(self)

    def note(self, name: str, dtype: Any, count: int, is_message: bool) -> Operation:
        """Record the call of an operation."""
        return flight_recorder.note(self._group, name, dtype, count, None, is_message, is_running=False)

    def started(self, operation: Operation, has_ended: Callable[[], bool]) -> None:
        """Record that the inner backend has queued an operation.

        Args:
            has_ended: Returns whether the GPU has run it.
        """
        with self._lock:
            operation.take_number()
            self._open.append(operation)
            self._held.append((operation, has_ended))
            if len(self._held) > _HELD_ENDS:
                self._held = [self._held[0], *self._held[1:-1:2], self._held[-1]]
            if len(self._open) > flight_recorder.RING:
                self._open.popleft().finish()
            self._begin_oldest()

    def refresh(self) -> None:
        """Record which operations have completed; called on the watchdog's thread."""
        with self._lock:
            if not self._held:
                return
            over = [operation.number for operation, has_ended in self._held if self._is_over(has_ended)]
            last_over = max(over, default=-1)
            self._held = [held for held in self._held if held[0].number > last_over]
            while self._open and self._open[0].number <= last_over:
                self._open.popleft().finish()
            self._begin_oldest()

    def _is_over(self, has_ended: Callable[[], bool]) -> bool:
        try:
            self._prepare_thread(self.device)
            return has_ended()
        except Exception:  # noqa: BLE001  a failed operation has ended; waiting for it raises the error
            return True

    def _begin_oldest(self) -> None:
        if self._open and self._open[0].start is None:
            self._open[0].begin()

    def close(self) -> None:
        """Release all operations, when the group is destroyed."""
        with self._lock:
            for operation in self._open:
                operation.finish()
            self._open.clear()
            self._held.clear()
        if self in _queues:
            _queues.remove(self)


def refresh_all() -> None:
    """Record which operations on streams have completed; called on the watchdog's thread."""
    for queue in _queues.copy():  # other threads may add and remove queues meanwhile
        queue.refresh()
