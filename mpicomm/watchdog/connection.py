"""Connections between ranks, and with `mpicomm run` and observers: messages over sockets, authenticated at both ends.

A message is its length, then its text. Calls never block, except those of the end that connects; all input is
validated. The two ends prove to each other that they have the same token (HMAC, RFC 2104), which is never sent: the
end that listens sends a `Challenge`; the other answers with a `Proof` and a nonce of its own, for which the `Welcome`
has the proof of the end that listens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection

from mpicomm import json_messages
from mpicomm.arguments import Deadline
from mpicomm.json_messages import Message
from mpicomm.settings import HOST_TIMEOUT
from mpicomm.watchdog import local_processes
from mpicomm.watchdog.protocol import Challenge, LocalProcess, Proof, Welcome

_LIMIT = 1 << 20  # bytes of a message on an authenticated connection: the status of a rank needs less
_UNAUTHENTICATED_LIMIT = 512  # bytes of a message before authentication
_CHUNK = 1 << 16  # bytes of one read
_PROBES = 4  # keepalive probes without an answer after which the kernel gives up a connection
_NONCE_BYTES = 16
_AUTHENTICATION_SECONDS = 10.0  # time limit of the end that listens
_MAX_PENDING = 128  # connections that have not authenticated, besides those that are expected
_ACCEPT_PAUSE = 0.01  # seconds after a failed accept, which may fail again at once
_CHECK_SECONDS = 0.5  # between two checks of the deadline while the end that connects waits for a message

_LENGTH = struct.Struct("!I")
_WELCOME = "welcome"  # takes the place of the rank in the proof of the end that listens


class Connection:
    """One end of a connection."""

    def __init__(self, sock: socket.socket, host_timeout: int = HOST_TIMEOUT) -> None:
        """Take ownership of a socket.

        Args:
            host_timeout: Seconds without an answer of the other host's kernel after which the connection is lost.
        """
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _set_timeout(sock, host_timeout)
        self.socket = sock
        self.is_trusted = False
        """Whether the messages of the other end may be long, or unknown, since it may be of another version."""

        self.rank = 0
        """The rank at the other end, as it has proved; see `identify`."""

        self.process = LocalProcess(0)
        self.received_at = time.monotonic()
        """When the last data arrived."""

        self._selector: selectors.BaseSelector | None = None
        self._on_messages: Callable[[Connection, list[Message], str], object]
        self._reports_crashes = False
        self._lost = ""  # why the connection is lost
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def identify(self, rank: int, process: LocalProcess) -> None:
        """Record who is at the other end, after it has proved that it has the token: its messages may be long now."""
        self.rank, self.process, self.is_trusted = rank, process, True

    def fileno(self) -> int:
        """Return the file descriptor of the socket, for selectors."""
        return self.socket.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Whether there is data to send that the socket has not accepted yet."""
        return bool(self._outgoing)

    def watch(
        self, selector: selectors.BaseSelector, on_messages: Callable[[Connection, list[Message], str], object]
    ) -> None:
        """Register at a selector, whose caller calls the data of each key with the mask of its event.

        Args:
            on_messages: Called with this connection, the messages that have arrived, and the reason why it is lost,
                and therefore closed; empty if it is not lost. Replaces that of an earlier call.
        """
        self._on_messages = on_messages
        if self._selector is None:
            self._selector = selector
            selector.register(self, selectors.EVENT_READ, self._handle_event)

    def report_crashes(self) -> None:
        """Report a signal that ends this process over this connection, too (`signals.catch_crashes`)."""
        self._reports_crashes = True
        _allow_crash_report(self, not self._outgoing)

    def unwatch(self) -> None:
        """Undo `watch` and `report_crashes`, as far as they were called."""
        if self._reports_crashes:
            self._reports_crashes = False
            _allow_crash_report(self, False)
        if self._selector is not None:
            self._selector.unregister(self)
            self._selector = None

    def send(self, message: Message) -> None:
        """Send a message as far as the socket accepts it without blocking; the rest follows when it accepts more."""
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send a message that `frame` returned, which may go to several connections."""
        self._outgoing += data
        self.flush()

    def flush(self) -> None:
        """Send the remaining data, as far as the socket accepts it without blocking."""
        if self._reports_crashes:
            _allow_crash_report(self, False)  # not between the parts of a message
        with contextlib.suppress(OSError):  # it accepts no more; or it is lost: then reading fails, too
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        if self._reports_crashes and not self._outgoing:
            _allow_crash_report(self, True)
        if self._selector is not None:
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            self._selector.modify(self, mask, self._handle_event)

    def receive(self) -> tuple[list[Message], str]:
        """Receive the data that has arrived.

        Returns:
            The complete and valid messages, and the reason why the connection is lost; empty if it is not lost.
        """
        while len(self._incoming) <= 2 * _LIMIT and self._read(_CHUNK):
            pass
        messages, invalid = self._split()
        return messages, self._lost or invalid

    def wait_for_message(self, deadline: Deadline) -> Message:
        """Wait for the next message, on a connection that is not watched, and read no further.

        Raises:
            OSError: If the connection is lost, or no message arrives before the deadline.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while (left := deadline.count_down()) > 0:
                if not selector.select(min(left, _CHECK_SECONDS)):
                    continue
                self._read(self._missing_bytes())
                messages, invalid = self._split()
                if messages:
                    return messages[0]
                if lost := self._lost or invalid:
                    raise ConnectionError(f"the other end closed the connection: {lost}")
        raise TimeoutError("timed out waiting for an answer")

    def close(self) -> None:
        """Close the socket; unsent data is lost."""
        self.unwatch()
        self.socket.close()

    def close_after_fork(self) -> None:
        """Close the descriptor in a forked child; its entry in the selector belongs to the parent, too."""
        self._selector = None
        self.close()

    def _handle_event(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and self._selector is not None:
            self.flush()
        if mask & selectors.EVENT_READ and self._selector is not None:  # not closed by an event before
            messages, lost = self.receive()
            if lost:
                self.close()
            if messages or lost:
                self._on_messages(self, messages, lost)

    def _read(self, size: int) -> bool:
        """Read at most `size` bytes, and return whether more may have arrived."""
        try:
            part = self.socket.recv(size)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lost = error.strerror or str(error)
            return False
        self._incoming += part
        self.received_at = time.monotonic()
        if not part:
            self._lost = "closed"
        return len(part) == size

    def _missing_bytes(self) -> int:
        """Return how many bytes of the next message are missing, or of its length."""
        size = _LENGTH.size
        if len(self._incoming) >= size:
            size += _LENGTH.unpack_from(self._incoming)[0]
        return size - len(self._incoming)

    def _split(self) -> tuple[list[Message], str]:
        """Return the complete messages, and what is wrong with the data; empty if it is valid."""
        messages: list[Message] = []
        limit = _LIMIT if self.is_trusted else _UNAUTHENTICATED_LIMIT
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > limit:
                return messages, f"sent a message of {length} bytes, the limit is {limit}"
            if len(self._incoming) < _LENGTH.size + length:
                break
            text = bytes(self._incoming[_LENGTH.size : _LENGTH.size + length])
            del self._incoming[: _LENGTH.size + length]
            try:
                message = json_messages.decode(text)
            except (ValueError, RecursionError):
                return messages, "sent data that is not a JSON object"
            if message is not None:
                messages.append(message)
            elif not self.is_trusted:
                return messages, "sent an unknown message"
        return messages, ""


def frame(message: Message) -> bytes:
    """Return a message as it is sent."""
    text = json_messages.encode(message)
    return _LENGTH.pack(len(text)) + text


def _allow_crash_report(connection: Connection, is_allowed: bool) -> None:
    from mpicomm.native import c_library  # imports torch, which commands do without; only ranks call this

    if (library := c_library.load()) is not None:
        library.mpicomm_set_connected(connection.fileno(), is_allowed)


def _set_timeout(sock: socket.socket, seconds: int) -> None:
    """Set the socket options that make a connection fail after so many seconds without an answer of the other host.

    A host that fails does not close its connections. The kernels send the keepalive probes, after a third of the time
    without data, so a rank that is stopped or holds the GIL still answers. TCP_USER_TIMEOUT applies to sent data that
    the other kernel does not acknowledge.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, 2 * seconds // (3 * _PROBES)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


# -- the end that listens ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A connection that has not authenticated."""

    nonce: bytes  # of the challenge
    deadline: Deadline


class Server:
    """A socket that listens, and the connections to it that have not authenticated yet. It has no thread of its own."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        token: bytes,
        rank: int,
        expected: Collection[int],
        admit: Callable[[Connection, list[Message]], object],
        host_timeout: int = HOST_TIMEOUT,
    ) -> None:
        """Accept connections.

        Args:
            selector: Its caller calls the data of each key with the mask of its event.
            listener: A socket that listens.
            token: The secret that both ends have.
            rank: The rank of this end, for the challenge.
            expected: The ranks that may connect, which may change.
            admit: Called with a connection that has authenticated, and the messages that followed its proof.
            host_timeout: Seconds after which a connection to a host that does not answer is lost.
        """
        self._selector = selector
        self._listener = listener
        self._token = token
        self._rank = rank
        self._expected = expected
        self._admit = admit
        self._host_timeout = host_timeout
        self._pending: dict[Connection, _Pending] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def close_expired(self) -> None:
        """Close the connections whose time has passed; call it regularly."""
        for connection in [late for late, pending in self._pending.items() if pending.deadline.count_down() <= 0]:
            self._refuse(connection)

    def stop_listening(self) -> None:
        """Accept no more connections."""
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()

    def close(self) -> None:
        """Stop listening, and close all connections that have not authenticated."""
        self.stop_listening()
        for connection in list(self._pending):
            self._refuse(connection)

    def close_after_fork(self) -> None:
        """Close all descriptors in a forked child; their entries in the selector belong to the parent, too."""
        self._listener.close()
        for connection in self._pending:
            connection.close_after_fork()

    def _accept(self, _mask: int) -> None:
        try:
            connection = Connection(self._listener.accept()[0], self._host_timeout)
        except OSError:  # the peer has closed the connection; or too many files are open, which may be temporary
            time.sleep(_ACCEPT_PAUSE)
            return
        # The expected ranks authenticate quickly: if there are many more connections, the oldest is closed.
        if len(self._pending) >= _MAX_PENDING + len(self._expected):
            self._refuse(next(iter(self._pending)))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._pending[connection] = _Pending(nonce, Deadline(_AUTHENTICATION_SECONDS))
        connection.watch(self._selector, self._authenticate)
        connection.send(Challenge(self._rank, local_processes.this_process(), nonce.hex()))

    def _authenticate(self, connection: Connection, messages: list[Message], lost: str) -> None:
        """Pass a connection on if its first message is the proof of an expected rank, or close it."""
        proof = messages[0] if messages else None
        if lost or not isinstance(proof, Proof) or not self._is_valid(proof, self._pending[connection].nonce):
            self._refuse(connection)
            return
        del self._pending[connection]
        connection.identify(proof.rank, proof.process)
        connection.send(Welcome(_proof_of(self._token, bytes.fromhex(proof.nonce), _WELCOME)))
        self._admit(connection, messages[1:])

    def _is_valid(self, proof: Proof, nonce: bytes) -> bool:
        if not (proof.proof.isascii() and _is_nonce(proof.nonce)):
            return False
        expected = _proof_of(self._token, nonce, str(proof.rank))
        return hmac.compare_digest(proof.proof, expected) and proof.rank in self._expected

    def _refuse(self, connection: Connection) -> None:
        del self._pending[connection]
        connection.close()


# -- the end that connects ---------------------------------------------------------------------------------------------


def connect(
    address: str, port: int, token: bytes, rank: int, seconds: float, host_timeout: int = HOST_TIMEOUT
) -> Connection:
    """Open a connection, and authenticate both ends.

    Args:
        rank: The rank of this end.
        seconds: The time limit for each of the two.
        host_timeout: Seconds after which a connection to a host that does not answer is lost.

    Raises:
        OSError: If the other end is unreachable, the connection is lost, or an answer does not arrive in time.
        ValueError: If the other end does not have the token, or sends another message.
    """
    return connect_over(socket.create_connection((address, port), timeout=seconds), token, rank, seconds, host_timeout)


def connect_over(
    sock: socket.socket, token: bytes, rank: int, seconds: float, host_timeout: int = HOST_TIMEOUT
) -> Connection:
    """Authenticate both ends over a connected socket, which is closed on failure; see `connect`.

    Raises:
        OSError: If the connection is lost, or an answer does not arrive in time.
        ValueError: If the other end does not have the token, or sends another message.
    """
    connection = Connection(sock, host_timeout)
    try:
        _prove(connection, token, rank, Deadline(seconds))
    except BaseException:
        connection.close()
        raise
    return connection


def _prove(connection: Connection, token: bytes, rank: int, deadline: Deadline) -> None:
    challenge = connection.wait_for_message(deadline)
    if not (isinstance(challenge, Challenge) and _is_nonce(challenge.nonce)):
        raise ValueError(f"received {challenge}; expected a challenge")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    proof = _proof_of(token, bytes.fromhex(challenge.nonce), str(rank))
    connection.send(Proof(rank, local_processes.this_process(), proof, nonce.hex()))
    welcome = connection.wait_for_message(deadline)
    if not (isinstance(welcome, Welcome) and welcome.proof.isascii()):
        raise ValueError(f"received {welcome}; expected a welcome")
    if not hmac.compare_digest(welcome.proof, _proof_of(token, nonce, _WELCOME)):
        raise ValueError("the other end does not have the token of the job")
    connection.identify(challenge.rank, challenge.process)


def _proof_of(token: bytes, nonce: bytes, name: str) -> str:
    """Return the proof that an end of a connection has the token."""
    return hmac.digest(token, nonce + name.encode(), "sha256").hex()


def _is_nonce(text: str) -> bool:
    """Return whether a text is a nonce; with one of any length, the proof of rank 1 would be that of rank 21, too."""
    try:
        return len(bytes.fromhex(text)) == _NONCE_BYTES
    except ValueError:
        return False
