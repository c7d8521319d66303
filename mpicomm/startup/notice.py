"""Prints a notice about absent ranks while a rank waits in MPI_Init, which neither returns nor releases the GIL.

A POSIX timer (timer_create with SIGEV_THREAD) calls the C library's system() on a thread of its own, which needs no GIL
and runs `absent.py`. It costs about 0.2 ms until the timer expires, and before that creates no process to clean up.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator

from mpicomm.launch.detect import Launch
from mpicomm.startup import absent
from mpicomm.startup.absent import Waiting

_NOTICE_SECONDS = 30.0  # after which a waiting rank prints which ranks are absent
_SIGEV_THREAD = 2  # bits/siginfo-consts.h, on every architecture
_commands: list[ctypes.Array[ctypes.c_char]] = []  # kept alive: an expired timer may read its command at any later time


class _SigEvent(ctypes.Structure):
    """struct sigevent of 64-bit Linux; the union of value and pointer goes to the function in an integer register."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class _TimerSpec(ctypes.Structure):
    """struct itimerspec: interval and first expiration, each in seconds and nanoseconds."""

    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


def seconds_before(hang_seconds: float, limit: float) -> float:
    """Return the seconds that a rank waits for others, at most `limit`, before it prints a notice."""
    return min(_NOTICE_SECONDS, hang_seconds, limit / 2)


@contextlib.contextmanager
def after(seconds: float, launch: Launch, phase: str, limit: float) -> Iterator[None]:
    """Print which ranks are absent if the block takes longer than `seconds`; all ranks must execute the same block.

    Nothing is printed if no launcher has set the rank, or if the system lacks such timers; the block's own deadline
    still applies.

    Args:
        phase: The operation that the ranks execute in the block, for the message.
        limit: The deadline of the block in seconds, for the message.
    """
    with contextlib.ExitStack() as stack:
        waiting = _waiting(launch, phase, seconds, limit)
        if waiting is not None and sys.executable:
            with contextlib.suppress(OSError, AttributeError):
                marker = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                marker.bind(f"\0{absent.MARKER}{waiting.pid}")
                _start_timer(stack, waiting)
        yield


def _waiting(launch: Launch, phase: str, seconds: float, limit: float) -> Waiting | None:
    """Return the arguments for `absent.py`; None without a launcher, or for a job of one process."""
    variable = next((claim.launcher.rank for claim in launch.all_claims if claim.rank is not None), None)
    size = launch.value("size")
    if variable is None or size == 1:
        return None
    return Waiting(
        pid=os.getpid(),
        rank=launch.rank,
        size=size,
        local_size=launch.value("local_size"),
        variable=variable,
        host=socket.gethostname(),
        phase=phase,
        seconds=seconds,
        limit=limit,
        script=sys.argv[0] if sys.argv else "",
    )


def _start_timer(stack: contextlib.ExitStack, waiting: Waiting) -> None:
    libc = ctypes.CDLL(None)
    arguments = [sys.executable, "-I", "-S", absent.__file__, json.dumps(dataclasses.asdict(waiting))]
    command = ctypes.create_string_buffer(f"exec {shlex.join(arguments)} </dev/null".encode())
    _commands.append(command)
    event = _SigEvent(
        value=ctypes.addressof(command),
        notify=_SIGEV_THREAD,
        function=ctypes.cast(libc.system, ctypes.c_void_p),
    )
    timer = ctypes.c_void_p()
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
        stack.callback(libc.timer_delete, timer)
        seconds, fraction = divmod(waiting.seconds, 1)
        spec = _TimerSpec(value=(int(seconds), int(fraction * 1e9)))
        libc.timer_settime(timer, 0, ctypes.byref(spec), None)
