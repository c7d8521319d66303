"""How a rank that fails takes the job with it.

An exception that nobody catches, on any thread, is printed once, with its rank, and ends the job by MPI_Abort. The hook
runs before the interpreter waits for non-daemon threads, so such threads cannot keep a dead rank, and with it the job,
alive. `sys.exit` is wrapped to remember its status: a rank that leaves by it says so, and ends the job if others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from mpicomm.errors import LaunchError, MpicommError, RendezvousError
from mpicomm.faults import recorder

_OTHERS_PATIENCE = 2.0  # seconds in which the first rank to fail prints and aborts, before another does
_BRIEF_RANKS = 8  # how many ranks may repeat an error in brief: rank 0's output may lie elsewhere
_PRINTING_SECONDS = 0.2  # launchers forward output by pipes; what is in flight at the abort may be lost


@dataclasses.dataclass(frozen=True)
class Hook:
    """A `sys.excepthook` that ends the job when its rank ends by an exception."""

    rank: int
    size: int
    hostname: str
    abort: Callable[[int], Any] | None
    """Ends the job with a status; None while there is no job to end."""

    is_first: Callable[[], bool]
    """Tells whether no other rank failed before."""

    previous: Callable[..., Any]
    previous_of_threads: Callable[[threading.ExceptHookArgs], Any]
    pid: int = dataclasses.field(default_factory=os.getpid)

    def of_thread(self, args: threading.ExceptHookArgs) -> None:
        """Do the same for an exception that ends a thread: the others may wait for what it was to do."""
        is_theirs = args.exc_value is None or args.exc_type is SystemExit or _is_aside(args.thread)
        if self is not _current or os.getpid() != self.pid or is_theirs or sys.is_finalizing():
            self.previous_of_threads(args)
        else:
            assert args.exc_value is not None
            self(args.exc_type, args.exc_value, args.exc_traceback)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        """Print what happened, once in the job, and end it."""
        if self is not _current or os.getpid() != self.pid:  # a job that is over, or a forked child
            self.previous(kind, error, trace)
            return
        is_everywhere = isinstance(error, MpicommError) and error.is_everywhere
        if is_everywhere or isinstance(error, LaunchError):  # the message says it all; the code is not at fault
            self._tell_message(error, is_everywhere)
        else:
            self._tell(kind, error, trace)
        # An error that every rank has ends each by itself, unless some ranks are not even there.
        if not is_everywhere or isinstance(error, RendezvousError):
            if is_everywhere and self.rank != 0:
                time.sleep(_OTHERS_PATIENCE)  # rank 0 speaks first
            self._end()

    def _tell_message(self, error: BaseException, is_everywhere: bool) -> None:
        if self.rank == 0:
            say(f"mpicomm.{type(error).__name__}: {error}\n")
        elif isinstance(error, LaunchError) and not is_everywhere and self.rank < _BRIEF_RANKS:
            # Most likely rank 0 has the same error, and the launcher ends this rank before it comes to speak.
            time.sleep(_OTHERS_PATIENCE)
            say(f"[mpicomm] rank {self.rank}: {type(error).__name__}: {error.brief}\n")

    def _end(self) -> None:
        if self.abort is not None and self.size > 1:
            time.sleep(_PRINTING_SECONDS)
            self.abort(1)

    def _tell(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        where = f"rank {self.rank} of {self.size} on {self.hostname}"
        if threading.current_thread() is not threading.main_thread():
            where += f", thread {threading.current_thread().name},"
        if self.size > 1 and not self.is_first():
            time.sleep(_OTHERS_PATIENCE)
            say(f"[mpicomm] {where} failed too: {traceback.format_exception_only(kind, error)[-1]}")
        elif self.previous is not sys.__excepthook__:
            say(f"[mpicomm] {where} failed:\n")
            self.previous(kind, error, trace)
        elif self.size == 1:
            self.previous(kind, error, trace)
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
            say(f"[mpicomm] {where} failed and ends the job:\n{text}")


def _is_aside(thread: threading.Thread | None) -> bool:
    """Tell whether a thread is one of those, like a progress bar's, that nobody waits for at the end."""
    return thread is None or (thread.daemon and not recorder.is_used_by(thread))


_current: Hook | None = None


def arm(
    rank: int,
    size: int,
    hostname: str,
    abort: Callable[[int], Any] | None = None,
    is_first: Callable[[], bool] = lambda: True,
) -> None:
    """Install the hook, or renew it now that more is known."""
    global _current  # noqa: PLW0603  a process has one excepthook
    # On renewal this also drops torch's hook, which came on top to say the rank: this one says it too.
    previous = _current.previous if _current else sys.excepthook
    previous_of_threads = _current.previous_of_threads if _current else threading.excepthook
    _current = Hook(rank, size, hostname, abort, is_first, previous, previous_of_threads)
    sys.excepthook = _current
    threading.excepthook = _current.of_thread
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a crash in C leaves a traceback, too


def disarm() -> None:
    """Take the hook out again; where somebody put another on top of it, it only passes on."""
    global _current  # noqa: PLW0603
    if _current is not None and sys.excepthook is _current:
        sys.excepthook = _current.previous
    if _current is not None and threading.excepthook == _current.of_thread:
        threading.excepthook = _current.previous_of_threads
    _current = None


_exit_status: int | None = None  # with which sys.exit was called last
_tell_exit_at_once: Callable[[int], Any] | None = None


def watch_exits(tell_exit_at_once: Callable[[int], Any]) -> None:
    """Have `sys.exit` remember its status, and `os._exit` say that it was called, which Python tells nobody in time.

    Args:
        tell_exit_at_once: Called with the status of `os._exit`, in this process alone.
    """
    global _tell_exit_at_once  # noqa: PLW0603  a process ends once
    _tell_exit_at_once = tell_exit_at_once
    if hasattr(sys.exit, "__wrapped__"):
        return
    python_exit, python_exit_at_once, pid = sys.exit, os._exit, os.getpid()

    @functools.wraps(python_exit)
    def sys_exit(status: Any = None, /) -> NoReturn:
        global _exit_status  # noqa: PLW0603
        if threading.current_thread() is threading.main_thread():
            _exit_status = 0 if status is None else status if isinstance(status, int) else 1
        python_exit(status)

    @functools.wraps(python_exit_at_once)
    def os_exit(status: int) -> NoReturn:
        if _tell_exit_at_once is not None and os.getpid() == pid:
            _tell_exit_at_once(status)
        python_exit_at_once(status)

    sys.exit, os._exit = sys_exit, os_exit


def exit_status() -> int | None:
    """Return the status with which this process is about to end, as far as it is known."""
    if getattr(sys, "last_value", None) is not None:  # an exception that was printed
        return 1
    return _exit_status


def say(text: str) -> None:
    """Write to stderr in one piece, so that the lines of several ranks do not mix."""
    with contextlib.suppress(Exception):  # a stream that fails must not keep the rank from ending the job
        sys.stdout.flush()
        sys.stderr.flush()
        if (held_back := _stderr_behind_pytest()) is not None:
            os.write(held_back, text.encode())
            return
        # The real stream: torch's own hook swaps sys.stderr, and would show what is in it after the job is gone.
        stream = sys.__stderr__ or sys.stderr
        stream.write(text)
        stream.flush()


def _stderr_behind_pytest() -> int | None:
    """Return the descriptor of the stderr that pytest holds back while a test runs, and would lose with the process."""
    capture = sys.modules.get("_pytest.capture")
    if capture is None:
        return None
    captures = (each for each in gc.get_objects() if isinstance(each, capture.FDCapture))
    return next((each.targetfd_save for each in captures if each.targetfd == 2 and each._state == "started"), None)
