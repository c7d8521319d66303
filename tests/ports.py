"""Reserves ports, so that no other job takes a port before the test's own job listens on it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port of this machine for a server that binds it with SO_REUSEADDR, as torch and mpicomm do.

    Linux allows such a server to bind the port of a socket that also has the option and does not listen, but does not
    assign the port to processes that request any free port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
