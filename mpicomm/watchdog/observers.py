"""The observers of a job (`mpicomm top`): they connect to a Unix socket of rank 0 or `mpicomm run`, and ask for status.

An observer can only ask. It cannot disturb the job: nothing here waits for it, its messages are short, it gets the next
answer only after it has read the last one, and there are few of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
from collections.abc import Sequence
from pathlib import Path

from mpicomm.arguments import Deadline
from mpicomm.watchdog import job_files
from mpicomm.watchdog.authentication import Authenticator
from mpicomm.watchdog.connection import Connection
from mpicomm.watchdog.job_files import JobFile
from mpicomm.watchdog.protocol import Message, StatusRefused, StatusRequest

OBSERVER = -2
"""Takes the place of a rank in the proof of an observer, and in the events of its connection."""

MAX_OBSERVERS = 8
IDLE_SECONDS = 60.0
"""Seconds without a request after which an observer is disconnected; it may be stopped."""


@dataclasses.dataclass
class _Observer:
    """The state of a connected observer."""

    idle_due: Deadline
    asks: bool = False
    """Whether it has not been sent the answer to its last request."""


class Observers:
    """The connections of the observers of one job; has no thread of its own."""

    def __init__(self, selector: selectors.BaseSelector, job: JobFile) -> None:
        """Listen, and write the job's file.

        Args:
            selector: All connections are registered there; the caller passes its events to `handle`.
            job: The description of the job.

        Raises:
            OSError: If the file cannot be written.
        """
        self._selector = selector
        self._job = job
        self._path: Path
        self._path, self._listener = job_files.publish(job)
        self._observers: dict[Connection, _Observer] = {}
        self._authenticator = Authenticator(
            selector, bytes.fromhex(job.token), OBSERVER, is_expected=lambda rank: rank == OBSERVER
        )
        selector.register(self._listener, selectors.EVENT_READ)

    def __contains__(self, file: object) -> bool:
        return file is self._listener or file in self._observers or file in self._authenticator.connections

    def __len__(self) -> int:
        return len(self._observers)

    @property
    def asks(self) -> bool:
        """Whether an observer waits for an answer."""
        return any(each.asks for each in self._observers.values())

    def handle(self, file: object, mask: int) -> bool:
        """Handle an event of the selector for one of these connections.

        Returns:
            Whether an observer has asked for the status.
        """
        if file is self._listener:
            self._authenticator.accept(self._listener)
        elif isinstance(file, Connection) and file.fileno() >= 0:  # not closed by an event before
            return self._receive(file, mask)
        return False

    def answer(self, messages: Sequence[Message]) -> None:
        """Send an answer to all observers that have asked."""
        for connection, observer in list(self._observers.items()):
            if observer.asks:
                observer.asks = False
                for message in messages:
                    connection.send_registered(self._selector, message)

    def close_expired(self) -> None:
        """Disconnect observers that have not authenticated, asked, or read an answer in time; call it regularly."""
        self._authenticator.close_expired()
        for connection in [each for each, observer in self._observers.items() if observer.idle_due.count_down() <= 0]:
            self._drop(connection)

    def close(self) -> None:
        """Disconnect all observers, and remove the job's file."""
        job_files.withdraw(self._path, self._job)
        self._authenticator.close()
        for connection in list(self._observers):
            self._drop(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()

    def close_in_child(self) -> None:
        """Close all descriptors in a forked child, but leave the job's file to the parent."""
        for connection in [*self._observers, *self._authenticator.connections]:
            connection.close()
        self._listener.close()

    def _receive(self, connection: Connection, mask: int) -> bool:
        messages: list[Message] = []
        lost = ""
        if connection in self._authenticator:
            proof, messages = self._authenticator.receive(connection)
            if proof is None or not self._admit(connection):
                return False
        else:
            if mask & selectors.EVENT_WRITE:
                connection.send_registered(self._selector)
            if mask & selectors.EVENT_READ:
                messages, lost = connection.receive()
        observer = self._observers[connection]
        for message in messages:
            if not isinstance(message, StatusRequest) or observer.asks or connection.has_outgoing:
                lost = lost or "it has sent another message, or has not read the answer to its last request"
                break
            observer.asks = True
            observer.idle_due = Deadline(IDLE_SECONDS)
        if lost:
            self._drop(connection)
        return bool(messages) and not lost

    def _admit(self, connection: Connection) -> bool:
        """Make a connection that has authenticated that of an observer, if there are not too many."""
        connection.is_trusted = False  # its messages are short, and each must be valid
        if is_full := len(self._observers) >= MAX_OBSERVERS:
            with contextlib.suppress(OSError):
                connection.send(StatusRefused(f"the job has {MAX_OBSERVERS} observers, which is the limit"))
        self._observers[connection] = _Observer(Deadline(IDLE_SECONDS))
        if is_full:
            self._drop(connection)
        return not is_full

    def _drop(self, connection: Connection) -> None:
        del self._observers[connection]
        self._selector.unregister(connection)
        connection.close()


def open_for(selector: selectors.BaseSelector, job: JobFile) -> Observers | None:
    """Return the observers of a job; None if no directory can be used for its file: the job needs no observers."""
    if not job.name:
        return None
    try:
        return Observers(selector, job)
    except OSError:
        return None
