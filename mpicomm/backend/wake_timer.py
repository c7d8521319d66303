"""A timer of the kernel for which a thread sleeps without the GIL."""

from __future__ import annotations

import ctypes
import functools
import os
import time


class _Setting(ctypes.Structure):
    """The `struct itimerspec` of Linux with 64-bit times."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class WakeTimer:
    """Wakes one thread, now or after a delay (timerfd of Linux).

    To wake a thread at once costs its waker tens of microseconds if both share a core: the thread then competes for the
    core and for the GIL. Setting the timer again before it expires postpones that: one system call, which on a virtual
    machine took 1 to 14 us.
    """

    def __init__(self) -> None:
        self._fd = _libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), f"timerfd_create failed: {os.strerror(ctypes.get_errno())}")
        self._set = _libc().timerfd_settime

    def set(self, nanoseconds: int) -> None:
        """Let `wait` return after at least one nanosecond.

        An earlier setting is replaced, also one that has expired if `wait` has not returned since.
        """
        if self._fd >= 0:
            self._set(self._fd, 0, _setting(nanoseconds), None)

    def wait(self) -> None:
        """Sleep until the timer has expired."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Release the timer; later settings have no effect."""
        fd, self._fd = self._fd, -1
        os.close(fd)


@functools.cache
def _setting(nanoseconds: int) -> object:
    seconds, rest = divmod(nanoseconds, 10**9)
    return ctypes.byref(_Setting(value_s=seconds, value_ns=rest))


@functools.cache
def _libc() -> ctypes.PyDLL:
    return ctypes.PyDLL(None, use_errno=True)  # these calls do not block: it keeps the GIL, which CDLL would release
