"""SIGTERM, noticed also while the main thread is inside a blocking MPI call.

Python runs a handler only between two instructions of the main thread. The interpreter's C handler, however, writes the
signal's number to a descriptor at once; the watchdog reads it there and calls, on its own thread, who has registered.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import types
from collections.abc import Callable

_callbacks: list[Callable[[], None]] = []
_is_watching = False
_wake_fd = -1
"""A duplicate of the watchdog's descriptor. While Python may write to this number it stays open: only the main thread
can have Python forget it, and code that has set a descriptor of its own may set this one again at any time."""

_previous_fd = -1
_previous_file: tuple[int, int] | None = None  # what `_previous_fd` was


def register(callback: Callable[[], None]) -> None:
    """Have `callback` called, on the watchdog's thread, when SIGTERM comes; the process does not end by it then."""
    _callbacks.append(callback)


def unregister(callback: Callable[[], None]) -> None:
    """Undo `register`."""
    with contextlib.suppress(ValueError):
        _callbacks.remove(callback)


def watch(wake_fd: int) -> None:
    """Have signals' numbers written to `wake_fd`; does nothing on other threads than the main one."""
    global _is_watching, _wake_fd, _previous_fd, _previous_file  # noqa: PLW0603  signals are the process's
    if threading.current_thread() is not threading.main_thread():
        return
    _wake_fd = os.dup(wake_fd) if _wake_fd < 0 else os.dup2(wake_fd, _wake_fd, inheritable=False)
    previous = signal.set_wakeup_fd(_wake_fd, warn_on_full_buffer=False)
    if previous != _wake_fd:  # it still is, if `unwatch` was called on another thread
        _previous_fd, _previous_file = previous, _identity(previous)
    _is_watching = True
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # without a handler of Python's nothing is written
        signal.signal(signal.SIGTERM, _on_sigterm)


def unwatch() -> None:
    """Undo `watch`, as far as nobody else has come on top of it."""
    global _is_watching  # noqa: PLW0603
    if not _is_watching:
        return
    _is_watching = False  # the handler ends the process by itself from now on
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
    with contextlib.suppress(OSError, ValueError):  # it may have been closed
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)


def _redirect() -> None:
    """Let `_wake_fd` be another number of the descriptor that was set before, or of /dev/null if there was none."""
    with contextlib.suppress(OSError):  # no descriptor is free: the number stays the watchdog's, and taken
        if _is_previous_open():
            os.dup2(_previous_fd, _wake_fd, inheritable=False)
            return
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_NONBLOCK)
        os.dup2(nowhere, _wake_fd, inheritable=False)
        os.close(nowhere)


def deliver(numbers: bytes) -> bool:
    """Hand signals to whoever registered, and all but SIGTERM to whoever watched before.

    Returns:
        Whether SIGTERM came and nobody takes care of it, so that the process has to end by it.
    """
    numbers = numbers.replace(b"\0", b"")  # a zero is no signal: somebody woke the watchdog
    if not numbers:
        return False
    if _is_previous_open():
        with contextlib.suppress(OSError):
            os.write(_previous_fd, numbers)
    if signal.SIGTERM not in numbers:
        return False
    for callback in _callbacks:
        callback()
    return not _callbacks and signal.getsignal(signal.SIGTERM) is _on_sigterm


def end_by_sigterm() -> None:
    """End this process as SIGTERM does by default; on any thread, where `signal.signal` is for the main one."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_previous_open() -> bool:
    """Tell whether there was a descriptor before, and its number is not another file's by now."""
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
    if current != _wake_fd:  # somebody's event loop is on top: the watchdog was not told
        signal.set_wakeup_fd(current)
        with contextlib.suppress(OSError):
            os.write(_wake_fd, bytes([number]))
