"""Mutual authentication of the two ends of a connection that have the same token (HMAC, RFC 2104).

The end that listens sends a `Challenge`; the other answers with a `Proof` that it has the token, and a nonce of its
own, for which the `Welcome` has the proof of the end that listens. The token itself is never sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable

from mpicomm.arguments import Deadline
from mpicomm.settings import HOST_TIMEOUT
from mpicomm.watchdog import local_processes
from mpicomm.watchdog.connection import Connection
from mpicomm.watchdog.protocol import Challenge, Message, Proof, Welcome

_NONCE_BYTES = 16
_SECONDS = 10.0  # time limit for a new connection
_MAX_CONNECTIONS = 128  # at the same time, besides those that are expected
_ACCEPT_PAUSE = 0.01
_CHECK_SECONDS = 0.5  # between two checks of the deadline while a rank waits for a message
_WELCOME = "welcome"  # takes the place of the rank in the proof of the end that listens


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A connection that has not authenticated."""

    nonce: bytes  # of the challenge
    deadline: Deadline


class Authenticator:
    """The connections to a listening socket that have not authenticated yet. It has no thread of its own."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        token: bytes,
        rank: int,
        is_expected: Callable[[int], bool],
        host_timeout: int = HOST_TIMEOUT,
    ) -> None:
        """Create the authenticator, without connections.

        Args:
            selector: All connections are registered there; the caller passes its events to `receive`.
            token: The secret that both ends have.
            rank: The rank of this end, for the challenge.
            is_expected: Returns whether a rank may connect.
            host_timeout: Seconds after which a connection to a host that does not answer is lost.
        """
        self._selector = selector
        self._token = token
        self._rank = rank
        self._is_expected = is_expected
        self._host_timeout = host_timeout
        self._pending: dict[Connection, _Pending] = {}

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._pending

    @property
    def connections(self) -> list[Connection]:
        """The connections that have not authenticated."""
        return list(self._pending)

    def accept(self, listener: socket.socket, expected: int = 1) -> None:
        """Accept a connection, and send it the challenge.

        Args:
            listener: The socket that is ready.
            expected: The number of ranks that may still connect. They authenticate quickly: if there are many more
                connections, the oldest is closed.
        """
        try:
            connection = Connection(listener.accept()[0], self._host_timeout)
        except OSError:  # the peer has closed the connection; or too many files are open, which may be temporary
            time.sleep(_ACCEPT_PAUSE)
            return
        if len(self._pending) >= _MAX_CONNECTIONS + expected:
            self._close(next(iter(self._pending)))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._pending[connection] = _Pending(nonce, Deadline(_SECONDS))
        self._selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # reading a lost connection fails, too: it is closed there
            connection.send(Challenge(self._rank, local_processes.this_process(), nonce.hex()))

    def receive(self, connection: Connection) -> tuple[Proof | None, list[Message]]:
        """Receive messages of a connection that has not authenticated.

        Returns:
            Its proof, and the messages that followed it. None if it has sent nothing yet, or has been closed since its
            first message was not the proof of an expected rank. A connection that has authenticated stays registered
            in the selector, and belongs to the caller.
        """
        messages, lost = connection.receive()
        proof = messages[0] if messages else None
        if lost or (messages and not self._is_valid(connection, proof)):
            self._close(connection)
            return None, []
        if not isinstance(proof, Proof):
            return None, []
        del self._pending[connection]
        connection.is_trusted = True
        with contextlib.suppress(OSError):
            connection.send(Welcome(_proof_of(self._token, bytes.fromhex(proof.nonce), _WELCOME)))
        return proof, messages[1:]

    def close_expired(self) -> None:
        """Close the connections whose time has passed; call it regularly."""
        for connection in [each for each, pending in self._pending.items() if pending.deadline.count_down() <= 0]:
            self._close(connection)

    def close(self) -> None:
        """Close all connections that have not authenticated."""
        for connection in self.connections:
            self._close(connection)

    def _is_valid(self, connection: Connection, message: Message | None) -> bool:
        if not (isinstance(message, Proof) and message.proof.isascii() and _is_nonce(message.nonce)):
            return False
        expected = _proof_of(self._token, self._pending[connection].nonce, str(message.rank))
        return hmac.compare_digest(message.proof, expected) and self._is_expected(message.rank)

    def _close(self, connection: Connection) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)
        connection.close()


def connect(
    address: str, port: int, token: bytes, rank: int, seconds: float, host_timeout: int = HOST_TIMEOUT
) -> tuple[Connection, Challenge, list[Message]]:
    """Open a connection, and authenticate both ends.

    Args:
        rank: The rank of this end.
        seconds: The time limit for each of the two.
        host_timeout: Seconds after which a connection to a host that does not answer is lost.

    Returns:
        The connection, the challenge, and the messages that followed the welcome.

    Raises:
        OSError: If the other end is unreachable, the connection is lost, or an answer does not arrive in time.
        ValueError: If the other end does not have the token, or sends another message.
    """
    return connect_over(socket.create_connection((address, port), timeout=seconds), token, rank, seconds, host_timeout)


def connect_over(
    sock: socket.socket, token: bytes, rank: int, seconds: float, host_timeout: int = HOST_TIMEOUT
) -> tuple[Connection, Challenge, list[Message]]:
    """Authenticate both ends over a connected socket, which is closed on failure; see `connect`.

    Raises:
        OSError: If the connection is lost, or an answer does not arrive in time.
        ValueError: If the other end does not have the token, or sends another message.
    """
    connection = Connection(sock, host_timeout)
    try:
        return connection, *_authenticate(connection, token, rank, Deadline(seconds))
    except BaseException:
        connection.close()
        raise


def _authenticate(
    connection: Connection, token: bytes, rank: int, deadline: Deadline
) -> tuple[Challenge, list[Message]]:
    connection.is_trusted = True  # for the size of messages: long ones may follow the welcome at once
    challenge, *_ = _next_messages(connection, deadline)
    if not (isinstance(challenge, Challenge) and _is_nonce(challenge.nonce)):
        raise ValueError(f"received {challenge}; expected a challenge")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    proof = _proof_of(token, bytes.fromhex(challenge.nonce), str(rank))
    connection.send(Proof(rank, local_processes.this_process(), proof, nonce.hex()))
    welcome, *others = _next_messages(connection, deadline)
    if not (isinstance(welcome, Welcome) and welcome.proof.isascii()):
        raise ValueError(f"received {welcome}; expected a welcome")
    if not hmac.compare_digest(welcome.proof, _proof_of(token, nonce, _WELCOME)):
        raise ValueError("the other end does not have the token of the job")
    return challenge, others


def _proof_of(token: bytes, nonce: bytes, name: str) -> str:
    """Return the proof that an end of a connection has the token."""
    return hmac.digest(token, nonce + name.encode(), "sha256").hex()


def _is_nonce(text: str) -> bool:
    """Return whether a text is a nonce; with one of any length, the proof of rank 1 would be that of rank 21, too."""
    try:
        return len(bytes.fromhex(text)) == _NONCE_BYTES
    except ValueError:
        return False


def _next_messages(connection: Connection, deadline: Deadline) -> list[Message]:
    """Wait for at least one message on a connection that is not in a selector yet.

    Raises:
        OSError: If the connection is lost, or no message arrives before the deadline.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while (left := deadline.count_down()) > 0:
            if not selector.select(min(left, _CHECK_SECONDS)):
                continue
            messages, lost = connection.receive()
            if messages:
                return messages
            if lost:
                raise ConnectionError(f"the other end closed the connection: {lost}")
    raise TimeoutError("timed out waiting for an answer")
