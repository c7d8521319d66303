"""The observers of a job (`mpicomm top`): they connect to a Unix socket of rank 0 or `mpicomm run`, and ask for status.

An observer can only ask. It cannot disturb the job: nothing here waits for it, its messages are short, it gets the next
answer only after it has read the last one, and there are few of them.
"""

from __future__ import annotations

import dataclasses
import selectors
from collections.abc import Callable, Sequence

from mpicomm.arguments import Deadline
from mpicomm.json_messages import Message
from mpicomm.watchdog import job_files
from mpicomm.watchdog.connection import Connection, Server
from mpicomm.watchdog.job_files import JobFile
from mpicomm.watchdog.protocol import StatusRefused, StatusRequest

OBSERVER = -2
"""Takes the place of a rank in the proof of an observer, and in the events of its connection."""

MAX_OBSERVERS = 8
"""The most observers of a job: rank 0 sends the status of all ranks to each."""

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

    def __init__(self, selector: selectors.BaseSelector, job: JobFile, ask: Callable[[], object]) -> None:
        """Listen, and write the job's file.

        Args:
            selector: Its caller calls the data of each key with the mask of its event.
            job: The description of the job.
            ask: Called when an observer asks for the status, unless an answer is under way, which is for it, too.

        Raises:
            OSError: If the file cannot be written.
        """
        self._selector = selector
        self._job = job
        self._ask = ask
        self._observers: dict[Connection, _Observer] = {}
        self._path, listener = job_files.publish(job)
        self._server = Server(selector, listener, bytes.fromhex(job.token), OBSERVER, (OBSERVER,), self._admit)

    def answer(self, messages: Sequence[Message]) -> None:
        """Send an answer to all observers that have asked."""
        for connection, observer in self._observers.items():
            if observer.asks:
                observer.asks = False
                for message in messages:
                    connection.send(message)

    def close_expired(self) -> None:
        """Disconnect observers that have not authenticated, asked, or read an answer in time; call it regularly."""
        self._server.close_expired()
        for connection in [idle for idle, observer in self._observers.items() if observer.idle_due.count_down() <= 0]:
            self._drop(connection)

    def close(self) -> None:
        """Disconnect all observers, and remove the job's file."""
        job_files.withdraw(self._path, self._job)
        self._server.close()
        for connection in list(self._observers):
            self._drop(connection)

    def close_after_fork(self) -> None:
        """Close all descriptors in a forked child, but leave the job's file to the parent."""
        self._server.close_after_fork()
        for connection in self._observers:
            connection.close_after_fork()

    def _admit(self, connection: Connection, messages: list[Message]) -> None:
        """Make a connection that has authenticated that of an observer, if there are not too many."""
        connection.is_trusted = False  # its messages are short, and each must be valid
        if len(self._observers) >= MAX_OBSERVERS:
            connection.send(StatusRefused(f"the job has {MAX_OBSERVERS} observers, which is the limit"))
            connection.close()
            return
        self._observers[connection] = _Observer(Deadline(IDLE_SECONDS))
        connection.watch(self._selector, self._receive)
        if messages:
            self._receive(connection, messages, "")

    def _receive(self, connection: Connection, messages: list[Message], lost: str) -> None:
        observer = self._observers[connection]
        is_request = [type(message) for message in messages] == [StatusRequest]
        if lost or not is_request or observer.asks or connection.has_outgoing:  # it has not read the last answer
            self._drop(connection)
            return
        is_under_way = any(other.asks for other in self._observers.values())
        observer.asks = True
        observer.idle_due = Deadline(IDLE_SECONDS)
        if not is_under_way:
            self._ask()

    def _drop(self, connection: Connection) -> None:
        del self._observers[connection]
        connection.close()


def open_for(selector: selectors.BaseSelector, job: JobFile, ask: Callable[[], object]) -> Observers | None:
    """Return the observers of a job; None if no directory can be used for its file: the job needs no observers."""
    if not job.name:
        return None
    try:
        return Observers(selector, job, ask)
    except OSError:
        return None
