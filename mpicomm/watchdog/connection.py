"""Messages over a socket: a length, then the message. Calls never block, and all input is validated."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections.abc import Callable

from mpicomm.settings import HOST_TIMEOUT
from mpicomm.watchdog import protocol
from mpicomm.watchdog.protocol import Message

_LENGTH = struct.Struct("!I")
_LIMIT = 1 << 20  # bytes of a message on an authenticated connection
_UNAUTHENTICATED_LIMIT = 512  # bytes of a message before authentication
_CHUNK = 1 << 16

_PROBES = 4


class Connection:
    """One end of a connection between two ranks, or between a process of the job and a command."""

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
        self.rank: int | None = None
        """The rank at the other end, if this rank is its hub."""

        self.received_at = time.monotonic()
        """When the last data arrived."""

        self.mark_sending: Callable[[bool], object] = _ignore
        """Called with True before data is sent, and with False when no part of a message is left to send."""

        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """Return the file descriptor of the socket, for selectors."""
        return self.socket.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Whether there is data to send that the socket has not accepted yet."""
        return bool(self._outgoing)

    def send(self, message: Message) -> None:
        """Send a message, as far as the socket accepts it without blocking; `flush` sends the rest.

        Raises:
            OSError: If the connection is lost.
        """
        text = protocol.encode(message)
        self._outgoing += _LENGTH.pack(len(text)) + text
        self.flush()

    def flush(self) -> None:
        """Send the remaining data, as far as the socket accepts it without blocking.

        Raises:
            OSError: If the connection is lost.
        """
        self.mark_sending(True)
        while self._outgoing:
            try:
                sent = self.socket.send(self._outgoing)
            except BlockingIOError:
                return
            del self._outgoing[:sent]
        self.mark_sending(False)

    def send_registered(self, selector: selectors.BaseSelector, message: Message | None = None) -> None:
        """Send a message, or the rest of earlier messages, as far as the socket accepts it.

        Args:
            selector: The selector at which the connection is registered: it then waits until it can send the rest.
            message: The message; None for the rest.

        Raises:
            KeyError: If the connection is not registered.
            ValueError: If it is closed.
        """
        with contextlib.suppress(OSError):  # reading a lost connection fails, too: it is dropped there
            if message is None:
                self.flush()
            else:
                self.send(message)
        selector.modify(self, selectors.EVENT_READ | (selectors.EVENT_WRITE if self.has_outgoing else 0))

    def receive(self) -> tuple[list[Message], str]:
        """Receive the data that has arrived.

        Returns:
            The complete and valid messages, and the reason why the connection is lost; empty if it is not lost.
        """
        lost = ""
        while not lost:
            try:
                part = self.socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError as error:
                lost = error.strerror or str(error)
                break
            self._incoming += part
            self.received_at = time.monotonic()
            if not part:
                lost = "closed"
            if len(self._incoming) > 2 * _LIMIT:
                break
        messages, invalid = self._split()
        return messages, lost or invalid

    def close(self) -> None:
        """Close the socket; unsent data is lost."""
        self.socket.close()

    def _split(self) -> tuple[list[Message], str]:
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
                message = protocol.decode(text)
            except (ValueError, RecursionError):
                return messages, "sent data that is not a JSON object"
            if message is not None:
                messages.append(message)
            elif not self.is_trusted:
                return messages, "sent an unknown message"
        return messages, ""


def _ignore(_is_sending: bool) -> None:
    """Do nothing."""


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
