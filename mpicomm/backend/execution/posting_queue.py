"""The messages that wait for a device before MPI receives them, in the order of the calls.

The content of a message may be written by work that is queued on a device, or be on its way to the host. MPI matches
messages of one pair of ranks in the order in which it receives them: a message waits for all earlier ones of its group,
also if it needs no device.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpicomm.backend.gpu import transport
from mpicomm.backend.gpu.transport import DeviceEvent

if TYPE_CHECKING:
    from mpi4py.MPI import Request


class UnpostedMessage(Protocol):
    """A message in the queue."""

    def start(self, post: Callable[[], Request]) -> None:
        """Pass the message to MPI; an error of `post` is the message's."""


class _Entry(NamedTuple):
    ready: DeviceEvent | None
    post: Callable[[], Request]
    message: UnpostedMessage

    def is_ready(self) -> bool:
        try:
            return self.ready is None or transport.has_reached(self.ready)
        except Exception:  # noqa: BLE001  an error of the device, which `start` raises again
            return True

    def start(self) -> None:
        self.message.start(self._post_when_ready)

    def _post_when_ready(self) -> Request:
        if self.ready is not None:
            self.ready.synchronize()
        return self.post()


class PostingQueue:
    """The messages of one group that MPI has not received; any thread may pass them to MPI."""

    def __init__(self) -> None:
        self.waiting: collections.deque[_Entry] = collections.deque()
        """The messages that wait, and the one that a thread is passing to MPI."""

        self._lock = threading.Lock()  # held by the thread that passes messages to MPI

    def add(self, ready: DeviceEvent | None, post: Callable[[], Request], message: UnpostedMessage) -> None:
        """Add a message.

        Args:
            ready: The event from which on MPI may access the message's memory; None: now.
            post: Passes it to MPI.
            message: The message.
        """
        self.waiting.append(_Entry(ready, post, message))

    def post_ready(self) -> None:
        """Pass messages to MPI, up to the first for which the device is not ready; does not wait."""
        if self._lock.acquire(blocking=False):
            try:
                while self.waiting and self.waiting[0].is_ready():
                    self._post_first()
            finally:
                self._lock.release()

    def post_all(self) -> None:
        """Pass all messages to MPI; waits for the device."""
        with self._lock:
            while self.waiting:
                self._post_first()

    def _post_first(self) -> None:
        self.waiting[0].start()
        self.waiting.popleft()  # after the call: a later message must not be faster
