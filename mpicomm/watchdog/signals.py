"""The signals that end this process: SIGTERM, and those of a crash.

SIGTERM is handled even while the main thread is inside a blocking MPI call. Python runs a handler only between two
instructions of the main thread. The interpreter's C handler, however, writes the signal's number to a descriptor at
once (`signal.set_wakeup_fd`). The watchdog reads it there, on its own thread.

A signal such as SIGSEGV is reported to the connected ranks by the C library's handler (crash.c). It runs after that of
faulthandler, which writes the Python stacks into a file in memory: the handler sends the signal and the last line of
Python, and prints the stacks. Without the C library, faulthandler prints them, and the other ranks learn only that the
process has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import signal
import sys
import threading
import types

from mpicomm import host_info, json_messages
from mpicomm.recorder.status import Crash

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)

_is_watching = False
_wake_fd = -1
"""A duplicate of the watchdog's descriptor. It stays open as long as Python may write to it: only the main thread can
reset the wakeup descriptor, and code that has set a descriptor of its own may restore this one at any time."""

_previous_fd = -1
_previous_file: tuple[int, int] | None = None  # device and inode of `_previous_fd`


def watch(wake_fd: int) -> None:
    """Let Python write the numbers of signals to `wake_fd`; does nothing on threads other than the main thread."""
    global _is_watching, _wake_fd, _previous_fd, _previous_file  # noqa: PLW0603  signals are the process's
    if threading.current_thread() is not threading.main_thread():
        return
    _wake_fd = os.dup(wake_fd) if _wake_fd < 0 else os.dup2(wake_fd, _wake_fd, inheritable=False)
    previous = signal.set_wakeup_fd(_wake_fd, warn_on_full_buffer=False)
    if previous != _wake_fd:  # equal if `unwatch` was called on another thread before
        _previous_fd, _previous_file = previous, _identity(previous)
    _is_watching = True
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # Python writes only signals with a Python handler
        signal.signal(signal.SIGTERM, _on_sigterm)


def unwatch() -> None:
    """Undo `watch`, except where other code has replaced its descriptor or its handler since."""
    global _is_watching  # noqa: PLW0603
    if not _is_watching:
        return
    _is_watching = False  # from now on the handler itself ends the process
    if threading.current_thread() is threading.main_thread():
        _restore()
    else:
        _redirect()


def _restore() -> None:
    global _wake_fd
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    current = signal.set_wakeup_fd(-1)
    if current == _wake_fd:
        os.close(_wake_fd)
        _wake_fd, current = -1, _previous_fd if _is_previous_open() else -1
    else:
        _redirect()
    with contextlib.suppress(OSError, ValueError):  # the descriptor may be closed
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)


def _redirect() -> None:
    """Make `_wake_fd` a duplicate of the descriptor that was set before `watch`, or of /dev/null."""
    with contextlib.suppress(OSError):  # no descriptor is free: `_wake_fd` remains the watchdog's duplicate
        if _is_previous_open():
            os.dup2(_previous_fd, _wake_fd, inheritable=False)
            return
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_NONBLOCK)
        os.dup2(nowhere, _wake_fd, inheritable=False)
        os.close(nowhere)


def handled(number: int) -> int | None:
    """Return the signal to raise for a stop request, given the handlers of the program; None if it handles none.

    The program's handler of the signal itself, or, for Ctrl-C, which by default ends a program, that of SIGTERM.
    """
    candidates = (number, signal.SIGTERM) if number == signal.SIGINT else (number,)
    return next((candidate for candidate in candidates if _is_handled_by_program(candidate)), None)


def _is_handled_by_program(number: int) -> bool:
    handler = signal.getsignal(number)
    return callable(handler) and handler not in (_on_sigterm, signal.default_int_handler)


def deliver(numbers: bytes) -> bool:
    """Write the numbers of signals that have arrived to the descriptor that was set before.

    Returns:
        Whether SIGTERM has arrived and the program has no handler for it, so that it must end the process.
    """
    numbers = numbers.replace(b"\0", b"")  # a zero byte only wakes the watchdog
    if not numbers:
        return False
    if _is_previous_open():
        with contextlib.suppress(OSError):
            os.write(_previous_fd, numbers)
    return signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _on_sigterm


def end_by_sigterm() -> None:
    """End this process by the default action of SIGTERM; on any thread, unlike `signal.signal`."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_previous_open() -> bool:
    """Return whether a descriptor was set before `watch`, and still refers to the same file."""
    return _previous_file is not None and _identity(_previous_fd) == _previous_file


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:  # closed, or -1
        return None
    return status.st_dev, status.st_ino


def _on_sigterm(number: int, _frame: types.FrameType | None) -> None:
    if not _is_watching:
        end_by_sigterm()
        return
    current = signal.set_wakeup_fd(_wake_fd, warn_on_full_buffer=False)
    if current != _wake_fd:  # an event loop has set its own descriptor: the watchdog was not woken
        signal.set_wakeup_fd(current)
        with contextlib.suppress(OSError):
            os.write(_wake_fd, bytes([number]))


# -- crashes -----------------------------------------------------------------------------------------------------------


def catch_crashes() -> None:
    """Report the signals that end this process, and print its Python stacks, unless the program does that itself."""
    catches_all = _catch_in_c()  # before faulthandler, which passes a signal on to the handler that it has found
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        stacks = _stacks() if catches_all else None
        faulthandler.enable(sys.__stderr__ if stacks is None else stacks)


def _library() -> ctypes.CDLL | None:
    from mpicomm.native import c_library  # imports torch, which commands do without; only ranks call this

    return c_library.load()


@functools.cache
def _catch_in_c() -> bool:
    """Catch the signals that the program does not handle, and return whether these are all."""
    if (library := _library()) is None:
        return False
    caught = [number for number in _CRASHES if signal.getsignal(number) == signal.SIG_DFL]  # also with faulthandler
    for number in caught:
        head = json_messages.encode(Crash(number.name, "")).removesuffix(b'"}')
        library.mpicomm_catch(number, head)
    return len(caught) == len(_CRASHES)


@functools.cache
def _stacks() -> int | None:
    """Return a file in memory that the library prints to stderr; None without the library."""
    library = _library()
    with contextlib.suppress(OSError):
        if library is not None and sys.__stderr__ is not None:
            stacks = host_info.memory_file("mpicomm-stacks")
            library.mpicomm_print_stacks(stacks, sys.__stderr__.fileno())
            return stacks
    return None
