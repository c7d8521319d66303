"""The record of operations that an inner backend, such as NCCL, runs on a stream of the GPU."""

from __future__ import annotations

import collections
import threading
from typing import Any

from mpicomm.recorder import flight_recorder
from mpicomm.recorder.flight_recorder import Group, Operation

_HELD_WORKS = 16  # the most works that a queue keeps and polls: each may keep its tensors alive
_queues: list[StreamQueue] = []


class StreamQueue:
    """The operations that an inner backend queues on a GPU's stream, where they run one after the other.

    Only the oldest pending operation runs, so the time in which the others are queued does not count towards their
    timeouts. The queue keeps and polls a few of the pending works, not all: a work may keep its tensors alive.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._open: collections.deque[Operation] = collections.deque()
        self._held: list[tuple[Operation, Any]] = []
        _queues.append(self)

    def note(self, name: str, dtype: Any, count: int, is_message: bool) -> Operation:
        """Record the call of an operation."""
        return flight_recorder.note(self._group, name, dtype, count, None, is_message, is_running=False)

    def started(self, operation: Operation, work: Any) -> None:
        """Record that the inner backend has queued an operation."""
        with self._lock:
            operation.take_number()
            self._open.append(operation)
            self._held.append((operation, work))
            if len(self._held) > _HELD_WORKS:
                self._held = [self._held[0], *self._held[1:-1:2], self._held[-1]]
            if len(self._open) > flight_recorder.RING:
                self._open.popleft().finish()
            self._begin_oldest()

    def refresh(self) -> None:
        """Record which operations have completed; called on the watchdog's thread."""
        with self._lock:
            last_over = max((operation.number for operation, work in self._held if _is_over(work)), default=-1)
            self._held = [(operation, work) for operation, work in self._held if operation.number > last_over]
            while self._open and self._open[0].number <= last_over:
                self._open.popleft().finish()
            self._begin_oldest()

    def _begin_oldest(self) -> None:
        if self._open and self._open[0].start is None:
            self._open[0].begin()

    def close(self) -> None:
        """Release all operations and works, when the group is destroyed."""
        with self._lock:
            for operation in self._open:
                operation.finish()
            self._open.clear()
            self._held.clear()
        if self in _queues:
            _queues.remove(self)


def _is_over(work: Any) -> bool:
    try:
        return work.is_completed()
    except Exception:  # noqa: BLE001  a failed operation has ended; waiting for it raises the error
        return True


def refresh_all() -> None:
    """Record which operations on streams have completed; called on the watchdog's thread."""
    for queue in _queues.copy():  # other threads may add and remove queues meanwhile
        queue.refresh()
