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
_wake_fd = -1
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
    global _wake_fd, _previous_fd, _previous_file  # noqa: PLW0603  signals are the process's
    if threading.current_thread() is not threading.main_thread():
        return
    _wake_fd, _previous_fd = wake_fd, signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    with contextlib.suppress(OSError):
        _previous_file = _identity(_previous_fd) if _previous_fd >= 0 else None
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # without a handler of Python's nothing is written
        signal.signal(signal.SIGTERM, _on_sigterm)


def unwatch() -> None:
    """Undo `watch`, as far as nobody else has come on top of it."""
    global _wake_fd, _previous_fd  # noqa: PLW0603
    if _wake_fd < 0:
        return
    if threading.current_thread() is not threading.main_thread():
        _wake_fd = _previous_fd = -1  # the handler ends the process by itself from now on
        return
    with contextlib.suppress(OSError, ValueError):  # who was here before may have closed theirs
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(_previous_fd if current == _wake_fd else current)
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _wake_fd = _previous_fd = -1


def deliver(numbers: bytes) -> bool:
    """Hand signals to whoever registered, and all but SIGTERM to whoever watched before.

    Returns:
        Whether SIGTERM came and nobody takes care of it, so that the process has to end by it.
    """
    numbers = numbers.replace(b"\0", b"")  # a zero is no signal: somebody woke the watchdog
    if not numbers:
        return False
    if _previous_fd >= 0:
        with contextlib.suppress(OSError):
            if _identity(_previous_fd) == _previous_file:  # the number may be another file's by now
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


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _on_sigterm(number: int, _frame: types.FrameType | None) -> None:
    if _wake_fd < 0:
        end_by_sigterm()
        return
    current = signal.set_wakeup_fd(_wake_fd, warn_on_full_buffer=False)
    if current != _wake_fd:  # somebody's event loop is on top: the watchdog was not told
        signal.set_wakeup_fd(current)
        with contextlib.suppress(OSError):
            os.write(_wake_fd, bytes([number]))
