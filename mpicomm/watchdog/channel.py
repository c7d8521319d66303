"""The out-of-band channel: TCP connections besides MPI, of every rank to a hub on its node, and of the hubs to rank 0.

It is a tree of two levels: rank 0 has connections to the ranks of its own node and to one rank of every other node. A
rank and its hub authenticate each other with the job's token, which they received by MPI (`authentication`). Rank 0
also has the connection to `mpicomm run` (`parent_link`). The channel has no thread of its own; calls of `poll` drive
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
from collections.abc import Sequence

from mpicomm.settings import HOST_TIMEOUT
from mpicomm.startup import open_files
from mpicomm.watchdog import authentication, crash_report, observers
from mpicomm.watchdog.authentication import Authenticator
from mpicomm.watchdog.connection import Connection
from mpicomm.watchdog.job_files import JobFile
from mpicomm.watchdog.observers import OBSERVER, Observers
from mpicomm.watchdog.protocol import Crash, LocalProcess, Message, StatusRequest

_BACKLOG = 4096
PARENT = -1
"""Takes the place of a rank in the events of the connection to `mpicomm run`."""


@dataclasses.dataclass(frozen=True)
class RankInfo:
    """The rank's position in the tree of the out-of-band channel."""

    rank: int
    hosts: Sequence[str]  # of every rank
    nodes: Sequence[int]  # of every rank
    hubs: Sequence[int]  # of every rank: the first rank of its node; for these first ranks, rank 0

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return len(self.hosts)

    @property
    def hub(self) -> int:
        """The rank to which this rank connects."""
        return self.hubs[self.rank]


@dataclasses.dataclass(frozen=True)
class ChannelEvent:
    """A message or a lost connection, as `Channel.poll` returns it."""

    rank: int | None  # at the other end; None for the connection to this rank's hub
    message: Message | None = None
    lost: str = ""  # why the connection ended; empty for a message
    crash: Crash | None = None  # the signal that ended the process at the other end, if it has reported one


class Channel:
    """The connections of one rank to its hub and to the ranks of which it is the hub (its children)."""

    def __init__(self, rank: int, token: bytes, host_timeout: int = HOST_TIMEOUT) -> None:
        """Create the channel, without connections.

        Args:
            host_timeout: Seconds after which the connections to a host that does not answer are lost.
        """
        self.rank = rank
        self.host_timeout = host_timeout
        self.children: dict[int, Connection] = {}
        self.processes: dict[int, LocalProcess] = {}
        """The process of every connected rank, as its first message gave it, also of ranks on other hosts."""

        self._token = token
        self._expected: set[int] = set()
        self._up: Connection | None = None
        self._crashed: list[Connection] = []
        self._parent: Connection | None = None  # to `mpicomm run`, on rank 0
        self._observers: Observers | None = None  # on rank 0, if it has no parent
        self._unread: list[Message] = []  # messages received together with the hub's welcome
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._authenticator = Authenticator(self._selector, token, rank, self._is_expected, host_timeout)
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.wake_fd = self._waker.fileno()
        """Writing to this descriptor wakes `poll`, which puts the bytes into `woken`."""

        self.woken = bytearray()

    # -- opening -------------------------------------------------------------------------------------------------

    def listen(self, address: str) -> int:
        """Listen for connections of this rank's children, and return the port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self._listener.getsockname()[1]

    def expect(self, ranks: set[int]) -> None:
        """Set which ranks may connect to this one; once they all have, the channel stops listening."""
        self._expected = set(ranks)
        open_files.allow(len(ranks))

    def connect(self, address: str, port: int, seconds: float) -> None:
        """Connect to this rank's hub.

        Raises:
            OSError: If the hub is unreachable, or does not accept this rank within `seconds`.
            ValueError: If the other end is not the hub.
        """
        self._up, challenge, self._unread = authentication.connect(
            address, port, self._token, self.rank, seconds, self.host_timeout
        )
        self.processes[challenge.rank] = challenge.process
        self._selector.register(self._up, selectors.EVENT_READ)
        crash_report.watch(self._up)

    def attach_parent(self, connection: Connection) -> None:
        """Take over rank 0's connection to `mpicomm run`."""
        connection.rank = PARENT
        self._parent = connection
        self._selector.register(connection, selectors.EVENT_READ)
        crash_report.watch(connection)

    def accept_observers(self, job: JobFile) -> None:
        """Listen for observers, if this host has a directory for the job's file."""
        self._observers = observers.open_for(self._selector, job)

    def close_observers(self) -> None:
        """Disconnect all observers, and remove the job's file."""
        if self._observers is not None:
            self._observers.close()
            self._observers = None

    # -- sending -------------------------------------------------------------------------------------------------

    def send_up(self, message: Message) -> None:
        """Send a message to the hub; does nothing if the connection is lost."""
        if self._up is not None:
            self._send(self._up, message)

    def send_to(self, child: int, message: Message) -> None:
        """Send a message to a child; does nothing if it is not connected."""
        if child in self.children:
            self._send(self.children[child], message)

    def send_down(self, message: Message) -> None:
        """Send a message to all children."""
        for connection in list(self.children.values()):
            self._send(connection, message)

    def send_to_parent(self, message: Message) -> None:
        """Send a message to `mpicomm run`; does nothing if it did not start the job, or the connection is lost."""
        if self._parent is not None:
            self._send(self._parent, message)

    def answer_observers(self, messages: Sequence[Message]) -> None:
        """Send an answer to the observers that have asked; `mpicomm run` forwards it to its own observers."""
        if self._observers is not None:
            self._observers.answer(messages)
        for message in messages:
            self.send_to_parent(message)

    def wake(self) -> None:
        """Make a waiting `poll` return; may be called on any thread."""
        with contextlib.suppress(OSError):  # full: a wake-up is pending already; closed: no thread waits any more
            self._waker.send(b"\0")

    # -- receiving -----------------------------------------------------------------------------------------------

    def poll(self, seconds: float) -> list[ChannelEvent]:
        """Wait for at most `seconds` for messages and lost connections, and return them."""
        events = [ChannelEvent(None, message) for message in self._unread]
        self._unread = []
        for key, mask in self._selector.select(0.0 if events else max(0.0, seconds)):
            if key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self.woken += self._woken.recv(4096)
            elif key.fileobj is self._listener and self._listener is not None:
                self._authenticator.accept(self._listener, len(self._expected))
            elif self._observers is not None and key.fileobj in self._observers:
                if self._observers.handle(key.fileobj, mask):
                    events.append(ChannelEvent(OBSERVER, StatusRequest()))
            elif isinstance(key.fileobj, Connection) and key.fileobj.fileno() >= 0:  # not closed by an event before
                if mask & selectors.EVENT_WRITE:
                    self._send(key.fileobj)
                if mask & selectors.EVENT_READ:
                    events += self._receive(key.fileobj)
        self._authenticator.close_expired()
        if self._observers is not None:
            self._observers.close_expired()
        return events

    def close(self) -> None:
        """Close all connections."""
        self._stop_listening()
        self.close_observers()
        self._authenticator.close()
        for connection in self._connections():
            self._drop(connection)
        for connection in self._crashed:
            connection.close()
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def close_in_child(self) -> None:
        """Close all descriptors in a forked child: the child shares them with the rank, and must not keep them open."""
        for connection in [*self._connections(), *self._crashed, *self._authenticator.connections]:
            crash_report.unwatch(connection)
            connection.close()
        if self._listener is not None:
            self._listener.close()
        if self._observers is not None:
            self._observers.close_in_child()
        self._selector.close()  # without unregistering: the entries belong to the rank, too
        self._waker.close()
        self._woken.close()

    def _connections(self) -> list[Connection]:
        return [*self.children.values(), *filter(None, [self._up, self._parent])]

    def _receive(self, connection: Connection) -> list[ChannelEvent]:
        if connection in self._authenticator:
            return self._admit(connection)
        messages, lost = connection.receive()
        crash = next((each for each in messages if isinstance(each, Crash)), None)
        if crash is not None:  # its last message: what follows is of threads that run on in the broken process
            messages = messages[: messages.index(crash)]
        events = [ChannelEvent(connection.rank, each) for each in messages]
        if lost or crash:  # a launcher may kill this process as soon as the other one has ended
            self._drop(connection, closes=crash is None)
            events.append(ChannelEvent(connection.rank, lost=lost or "crashed", crash=crash))
        return events

    def _admit(self, connection: Connection) -> list[ChannelEvent]:
        """Make a connection that has authenticated that of a child."""
        proof, messages = self._authenticator.receive(connection)
        if proof is None:
            return []
        self._expected.remove(proof.rank)
        connection.rank = proof.rank
        self.children[proof.rank] = connection
        crash_report.watch(connection)
        self.processes[proof.rank] = proof.process
        if not self._expected:
            self._stop_listening()
        return [ChannelEvent(proof.rank, message) for message in messages]

    def _is_expected(self, rank: int) -> bool:
        return rank in self._expected

    def _send(self, connection: Connection, message: Message | None = None) -> None:
        with contextlib.suppress(KeyError, ValueError):  # dropped meanwhile
            connection.send_registered(self._selector, message)

    def _drop(self, connection: Connection, *, closes: bool = True) -> None:
        """Forget a connection. That to a process which crashes stays open: this rank would seem to be dead there."""
        crash_report.unwatch(connection)
        if connection is self._up:
            self._up = None
        elif connection is self._parent:
            self._parent = None
        elif connection.rank is not None:
            del self.children[connection.rank]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        if closes:
            connection.close()
        else:
            self._crashed.append(connection)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
