"""Hooks on unhandled exceptions, `sys.exit` and `os._exit`: abort the job when a rank fails.

An unhandled exception, on any thread, is printed once, with its rank, and aborts the job by MPI_Abort. The hook runs
before the interpreter waits for non-daemon threads, so such threads cannot keep a failed rank, and with it the job,
alive. `sys.exit` raises an exception that records its status when Python ends the process by it: the rank reports the
status to the others, and the job is aborted if they wait for the rank.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from mpicomm import remedies
from mpicomm.errors import LaunchError, MpicommError, RendezvousError
from mpicomm.recorder import flight_recorder
from mpicomm.watchdog import error_output, signals

_LATER_FAILURE_WAIT = 2.0  # seconds that later failing ranks wait while the first one prints and aborts
_BRIEF_RANKS = 8  # ranks that repeat rank 0's error in one line: its output may be in another file
_OTHER_RANKS_WAIT = 10.0  # seconds after which the others do: only if rank 0's error has not ended them
_PRINTING_SECONDS = 0.2  # launchers forward output by pipes; output in flight at the abort may be lost

_OUTERMOST = ("<module>", "_run_module_as_main", "_bootstrap")
"""The outermost functions of a script, of `python -m`, and of a thread."""


@dataclasses.dataclass(frozen=True)
class ExceptHook:
    """A `sys.excepthook` that aborts the job when an exception ends its rank."""

    rank: int
    size: int
    hostname: str
    abort: Callable[[int], Any] | None
    """Aborts the job with a status; None before the job exists."""

    is_first: Callable[[], bool]
    """Returns True if no other rank has failed before."""

    is_formed: Callable[[], bool]
    """Returns True if the ranks have formed the job: a later LaunchError is one of the program, with a traceback."""

    previous: Callable[..., Any]
    previous_of_threads: Callable[[threading.ExceptHookArgs], Any]
    pid: int = dataclasses.field(default_factory=os.getpid)

    def of_thread(self, args: threading.ExceptHookArgs) -> None:
        """Handle an exception that ends a thread: other ranks may wait for the operations of that thread."""
        is_ignored = args.exc_value is None or args.exc_type is SystemExit or _is_helper(args.thread)
        if self is not _current or os.getpid() != self.pid or is_ignored or sys.is_finalizing():
            self.previous_of_threads(args)
        else:
            assert args.exc_value is not None
            self._fail(args.exc_type, args.exc_value, args.exc_traceback)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        """Print the exception, once per job, and abort the job, if the exception ends this process."""
        if self is not _current or os.getpid() != self.pid or _continues():  # after the job, or in a forked child
            self.previous(kind, error, trace)
        else:
            self._fail(kind, error, trace)

    def _fail(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        is_on_all_ranks = isinstance(error, MpicommError) and error.is_on_all_ranks
        is_of_launch = isinstance(error, LaunchError) and not self.is_formed()
        if is_on_all_ranks or is_of_launch:  # no traceback: the cause is not a bug in the program
            self._print_message(error, is_on_all_ranks)
        else:
            self._print_error(kind, error, trace)
        # An error on all ranks ends each of them without an abort, unless it is that some ranks have not arrived.
        if not is_on_all_ranks or isinstance(error, RendezvousError):
            if is_on_all_ranks and self.rank != 0:
                time.sleep(_LATER_FAILURE_WAIT)  # rank 0 prints first
            if self.abort is not None and self.size > 1:
                time.sleep(_PRINTING_SECONDS)
                self.abort(1)

    def _print_message(self, error: BaseException, is_on_all_ranks: bool) -> None:
        if self.rank == 0:
            error_output.print_stderr(f"mpicomm.{type(error).__name__}: {error}\n")
        elif isinstance(error, LaunchError) and not is_on_all_ranks:
            # Usually rank 0 has the same error, and the launcher ends this rank before it prints.
            time.sleep(_LATER_FAILURE_WAIT if self.rank < _BRIEF_RANKS else _OTHER_RANKS_WAIT)
            error_output.print_stderr(f"[mpicomm] rank {self.rank}: {type(error).__name__}: {error.brief}\n")

    def _print_error(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        name = f"rank {self.rank} of {self.size} on {self.hostname}"
        if threading.current_thread() is not threading.main_thread():
            name += f", thread {threading.current_thread().name},"
        if self.size > 1 and not self.is_first():
            time.sleep(_LATER_FAILURE_WAIT)
            error_output.print_stderr(
                f"[mpicomm] {name} also failed: {traceback.format_exception_only(kind, error)[-1]}"
            )
        elif self.previous is not sys.__excepthook__:
            error_output.print_stderr(f"[mpicomm] {name} failed:\n")
            self.previous(kind, error, trace)
        elif self.size == 1:
            self.previous(kind, error, trace)
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
            error_output.print_stderr(f"[mpicomm] {name} failed; aborting the job:\n{text}")
        if (remedy := remedies.after(error, os.environ, has_bootstrapped=True)) is not None:
            error_output.print_stderr(f"[mpicomm] {remedy}\n")


def _continues() -> bool:
    """Return whether the program called `sys.excepthook` and continues, as `code.interact` does to print an error.

    Python calls the hook after the program's last frame has ended: then the outermost frame is the hook's own, or that
    of a hook that calls it.
    """
    *_, (outermost, _line) = traceback.walk_stack(sys._getframe())
    return outermost.f_code.co_name in _OUTERMOST or _is_at_prompt()


def _is_at_prompt() -> bool:
    """Return whether Python's prompt (in C) continues after the error; ps1 alone may come from `code.interact`."""
    return hasattr(sys, "ps1") and bool(sys.flags.interactive or not sys.argv[0])


def _is_helper(thread: threading.Thread | None) -> bool:
    """Return whether a thread is, like a progress bar's, a daemon that has called no operations."""
    return thread is None or (thread.daemon and not flight_recorder.is_used_by(thread))


_current: ExceptHook | None = None


def arm(
    rank: int,
    size: int,
    hostname: str,
    abort: Callable[[int], Any] | None = None,
    is_first: Callable[[], bool] = lambda: True,
    is_formed: Callable[[], bool] = lambda: False,
) -> None:
    """Install the hook, or replace it by one with more information about the job."""
    global _current  # noqa: PLW0603  a process has one excepthook
    # Replacing also removes torch's hook, installed on top to print the rank: this hook prints the rank, too.
    previous = _current.previous if _current else sys.excepthook
    if isinstance(previous, remedies.Hook):  # this hook prints the remedy, too
        previous = previous.previous
    previous_of_threads = _current.previous_of_threads if _current else threading.excepthook
    _current = ExceptHook(rank, size, hostname, abort, is_first, is_formed, previous, previous_of_threads)
    sys.excepthook = _current
    threading.excepthook = _current.of_thread
    signals.catch_crashes()  # a crash in C code then prints a traceback, too


def disarm() -> None:
    """Remove the hook. If other code has installed another hook on top, this one only calls the previous hook."""
    global _current  # noqa: PLW0603
    if _current is not None and sys.excepthook is _current:
        sys.excepthook = _current.previous
    if _current is not None and threading.excepthook == _current.of_thread:
        threading.excepthook = _current.previous_of_threads
    _current = None


_code: Any = vars(SystemExit)["code"]


class _Exit(SystemExit):
    """The exception that `sys.exit` raises: records its status when Python ends the process by it (not if caught)."""

    @property
    def code(self) -> Any:
        global _exit_status  # noqa: PLW0603  a process ends once
        status = _code.__get__(self)
        if sys._getframe().f_back is None:  # read by the interpreter, outside all functions of the program
            _exit_status = _as_number(status)
        return status

    @code.setter
    def code(self, status: Any) -> None:
        _code.__set__(self, status)

    def __reduce__(self) -> tuple[type[SystemExit], tuple[Any, ...]]:
        return SystemExit, self.args


_Exit.__module__ = "builtins"  # tracebacks show it as SystemExit
_Exit.__name__ = _Exit.__qualname__ = "SystemExit"


def _as_number(status: Any) -> int:
    """Return the exit status of the process for an argument of `sys.exit`."""
    return 0 if status is None else status if isinstance(status, int) else 1


_exit_status: int | None = None  # the status with which sys.exit ends the process
_on_exit_at_once: Callable[[int], Any] | None = None


def watch_exits(on_exit_at_once: Callable[[int], Any]) -> None:
    """Wrap `sys.exit` to record its status, and `os._exit`, for which Python has no hook, to report its call.

    Args:
        on_exit_at_once: Called with the status of `os._exit`; not called in forked children.
    """
    global _on_exit_at_once  # noqa: PLW0603  a process ends once
    _on_exit_at_once = on_exit_at_once
    if hasattr(sys.exit, "__wrapped__"):
        return
    python_exit, python_exit_at_once, pid = sys.exit, os._exit, os.getpid()

    @functools.wraps(python_exit)
    def sys_exit(status: Any = None, /) -> NoReturn:
        # On other threads it ends only the thread, and `threading` compares with the exact type SystemExit.
        if threading.current_thread() is threading.main_thread() and os.getpid() == pid:
            raise _Exit() if status is None else _Exit(status)
        python_exit(status)

    @functools.wraps(python_exit_at_once)
    def os_exit(status: int) -> NoReturn:
        if _on_exit_at_once is not None and os.getpid() == pid:
            _on_exit_at_once(status)
        python_exit_at_once(status)

    sys.exit, os._exit = sys_exit, os_exit


def exit_status() -> int | None:
    """Return the status with which this process is about to end; None if it is unknown."""
    if _ends_by(getattr(sys, "last_value", None)):
        return 1
    handled = sys.exc_info()[1]  # for example in a `finally`
    if isinstance(handled, SystemExit) and threading.current_thread() is threading.main_thread():
        return _as_number(handled.code)
    return _exit_status


def _ends_by(printed: BaseException | None) -> bool:
    """Return whether a printed exception ended the program, and not only a line at a prompt within the program."""
    trace = None if printed is None else printed.__traceback__
    return trace is not None and trace.tb_frame.f_back is None and not _is_at_prompt()
