"""The out-of-band channel: TCP connections besides MPI, of every rank to a hub on its node, and of the hubs to rank 0.

It is a tree of two levels: rank 0 has connections to the ranks of its own node and to one rank of every other node. A
rank and its hub authenticate each other with the job's token, which they received by MPI (`connection`). Rank 0 also
has the connection to `mpicomm run` (`parent_link`). The channel has no thread of its own; calls of `poll` drive
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import selectors
import socket
from collections.abc import Iterable, Sequence

from mpicomm import open_files
from mpicomm.json_messages import Message
from mpicomm.recorder.status import Crash
from mpicomm.settings import HOST_TIMEOUT
from mpicomm.watchdog import observers
from mpicomm.watchdog.connection import Connection, Server, connect, frame
from mpicomm.watchdog.job_files import JobFile
from mpicomm.watchdog.observers import OBSERVER, Observers
from mpicomm.watchdog.protocol import LocalProcess, StatusRequest

_BACKLOG = 4096  # connections that wait to be accepted: all ranks of a node, and a rank of each node, connect at once
_WAKE_UP_BYTES = 4096  # of one read; each byte is a signal or a wake-up

SUPERVISOR = -1
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
        """The process of every rank that has been connected, also of ranks on other hosts."""

        self._token = token
        self._expected: set[int] = set()
        self._up: Connection | None = None
        self._crashed: list[Connection] = []
        self._parent: Connection | None = None  # to `mpicomm run`, on rank 0
        self._observers: Observers | None = None  # on rank 0, if it has no parent
        self._server: Server | None = None
        self._events: list[ChannelEvent] = []  # since the last call of `poll`
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._receive_wake_up)
        self.wake_fd = self._waker.fileno()
        """Writing to this descriptor wakes `poll`, whose bytes `take_woken` returns."""

        self._received_wake_ups = bytearray()

    # -- opening -------------------------------------------------------------------------------------------------

    def listen(self, address: str, ranks: Iterable[int]) -> int:
        """Listen for connections of these ranks until they all have connected, and return the port.

        Raises:
            OSError: If the address cannot be used.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._expected.update(ranks)
        open_files.allow(len(self._expected))
        self._server = Server(
            self._selector, listener, self._token, self.rank, self._expected, self._admit, self.host_timeout
        )
        return listener.getsockname()[1]

    def connect(self, address: str, port: int, seconds: float) -> None:
        """Connect to this rank's hub.

        Raises:
            OSError: If the hub is unreachable, or does not accept this rank within `seconds`.
            ValueError: If the other end is not the hub.
        """
        self._up = connect(address, port, self._token, self.rank, seconds, self.host_timeout)
        self.processes[self._up.rank] = self._up.process
        self._watch(self._up, None)

    def attach_parent(self, connection: Connection) -> None:
        """Take over rank 0's connection to `mpicomm run`."""
        self._parent = connection
        self._watch(connection, SUPERVISOR)

    def accept_observers(self, job: JobFile) -> None:
        """Listen for observers, if this host has a directory for the job's file."""
        self._observers = observers.open_for(
            self._selector, job, lambda: self._events.append(ChannelEvent(OBSERVER, StatusRequest()))
        )

    def close_observers(self) -> None:
        """Disconnect all observers, and remove the job's file."""
        if self._observers is not None:
            self._observers.close()
            self._observers = None

    # -- sending -------------------------------------------------------------------------------------------------

    def send_up(self, message: Message) -> None:
        """Send a message to the hub; does nothing if the connection is lost."""
        if self._up is not None:
            self._up.send(message)

    def send_to(self, child: int, message: Message) -> None:
        """Send a message to a child; does nothing if it is not connected."""
        if child in self.children:
            self.children[child].send(message)

    def send_down(self, message: Message) -> None:
        """Send a message to all children."""
        data = frame(message) if self.children else b""
        for connection in self.children.values():
            connection.send_frame(data)

    def send_to_parent(self, message: Message) -> None:
        """Send a message to `mpicomm run`; does nothing if it did not start the job, or the connection is lost."""
        if self._parent is not None:
            self._parent.send(message)

    def answer_observers(self, messages: Sequence[Message]) -> None:
        """Send an answer to the observers that have asked; `mpicomm run` forwards it to its own observers."""
        if self._observers is not None:
            self._observers.answer(messages)
        for message in messages:
            self.send_to_parent(message)

    def take_woken(self) -> bytes:
        """Return the bytes that have woken `poll` since the last call: signals (`signal.set_wakeup_fd`) and zeros."""
        received = bytes(self._received_wake_ups)
        self._received_wake_ups.clear()
        return received

    def wake(self) -> None:
        """Make a waiting `poll` return; may be called on any thread."""
        with contextlib.suppress(OSError):  # full: a wake-up is pending already; closed: no thread waits any more
            self._waker.send(b"\0")

    # -- receiving -----------------------------------------------------------------------------------------------

    def poll(self, seconds: float) -> list[ChannelEvent]:
        """Wait for at most `seconds` for messages and lost connections, and return them."""
        for key, mask in self._selector.select(max(0.0, seconds)):
            key.data(mask)
        for server in self._servers():
            server.close_expired()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all connections."""
        self.close_observers()
        if self._server is not None:
            self._server.close()
        for connection in self._connections():
            connection.close()
        self.children.clear()
        self._up = self._parent = None
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def close_after_fork(self) -> None:
        """Close all descriptors in a forked child: the child shares them with the rank, and must not keep them open."""
        for connection in self._connections():
            connection.close_after_fork()
        for server in self._servers():
            server.close_after_fork()
        self._selector.close()  # without unregistering: the entries belong to the rank, too
        self._waker.close()
        self._woken.close()

    def _servers(self) -> list[Server | Observers]:
        return [server for server in (self._server, self._observers) if server is not None]

    def _connections(self) -> list[Connection]:
        return [*self.children.values(), *filter(None, [self._up, self._parent]), *self._crashed]

    def _receive_wake_up(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._received_wake_ups += self._woken.recv(_WAKE_UP_BYTES)

    def _admit(self, connection: Connection, messages: list[Message]) -> None:
        """Make a connection that has authenticated that of a child."""
        rank = connection.rank
        self._expected.remove(rank)
        self.children[rank] = connection
        self.processes[rank] = connection.process
        self._watch(connection, rank)
        if not self._expected and self._server is not None:
            self._server.stop_listening()
        self._receive(rank, connection, messages, "")

    def _watch(self, connection: Connection, rank: int | None) -> None:
        """Receive the messages of a connection, and report a crash of this process over it."""
        connection.watch(self._selector, functools.partial(self._receive, rank))
        connection.report_crashes()

    def _receive(self, rank: int | None, connection: Connection, messages: list[Message], lost: str) -> None:
        crash = next((message for message in messages if isinstance(message, Crash)), None)
        if crash is not None:
            messages = messages[: messages.index(crash)]  # what follows is of threads that run on in the broken process
            # Not closed: to these threads, this rank would seem to be dead.
            connection.unwatch()
            self._crashed.append(connection)
        self._events += [ChannelEvent(rank, message) for message in messages]
        if not (lost or crash):
            return
        # A crash is reported at once: a launcher may kill this process as soon as the other one has ended.
        if rank is None:
            self._up = None
        elif rank == SUPERVISOR:
            self._parent = None
        else:
            del self.children[rank]
        self._events.append(ChannelEvent(rank, lost=lost or "crashed", crash=crash))
