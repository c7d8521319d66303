"""Ports that no other job takes between a test that chooses one and its job that listens on it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Keep a port of this machine for a server that binds it with SO_REUSEADDR, as torch and mpicomm do.

    Linux lets such a server bind the port of a socket that has the option too and does not listen, but gives the port
    to nobody who asks for any free one.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
