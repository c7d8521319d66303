"""Reports the signal that ends this process, such as SIGSEGV, to the ranks that are connected to it.

The C library's handler (crash.c) runs after that of faulthandler, which writes the Python stacks into a file in memory:
the handler sends the signal and the last line of Python to the connected ranks, and prints the stacks. Without the C
library, faulthandler prints them, and the other ranks learn only that the process has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import signal
import sys

from mpicomm.watchdog import protocol
from mpicomm.watchdog.connection import Connection

_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


def install() -> None:
    """Report the signals that end this process, and print its Python stacks, unless the program does that itself."""
    catches_all = _catch_signals()  # before faulthandler, which passes a signal on to the handler that it has found
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        stacks = _stacks() if catches_all else None
        faulthandler.enable(sys.__stderr__ if stacks is None else stacks)


def watch(connection: Connection) -> None:
    """Report a signal over this connection, too, except in the middle of another message."""
    connection.mark_sending = lambda is_sending: _set_connected(connection, not is_sending)
    _set_connected(connection, not connection.has_outgoing)


def unwatch(connection: Connection) -> None:
    """Report no signal over this connection, whose descriptor is about to be closed."""
    connection.mark_sending = lambda _is_sending: None
    _set_connected(connection, False)


def _library() -> ctypes.CDLL | None:
    from mpicomm.shm import native  # imports torch, which commands do without; only ranks call this

    return native.library()


@functools.cache
def _catch_signals() -> bool:
    """Catch the signals that the program does not handle, and return whether these are all."""
    if (library := _library()) is None:
        return False
    caught = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_DFL]  # also with faulthandler
    for number in caught:
        head = protocol.encode(protocol.Crash(number.name, "")).removesuffix(b'"}')
        library.mpicomm_catch(number, head)
    return len(caught) == len(_SIGNALS)


@functools.cache
def _stacks() -> int | None:
    """Return a file in memory that the library prints to stderr; None without the library."""
    library = _library()
    with contextlib.suppress(OSError):
        if library is not None and sys.__stderr__ is not None:
            stacks = os.memfd_create("mpicomm-stacks")
            library.mpicomm_print_stacks(stacks, sys.__stderr__.fileno())
            return stacks
    return None


def _set_connected(connection: Connection, is_connected: bool) -> None:
    if (library := _library()) is not None:
        library.mpicomm_set_connected(connection.fileno(), is_connected)
