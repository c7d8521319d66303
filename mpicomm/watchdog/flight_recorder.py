"""The recorder: the last operations of this rank, in a ring that is always on.

An operation notes where in the user's program it was called as a code object and the instruction in it: a line number
costs microseconds to find in a long function, and is found when somebody asks.
"""

from __future__ import annotations

import collections
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import get_ident
from time import monotonic
from typing import Any

from mpicomm.errors import MpicommError
from mpicomm.watchdog import hang_report

RING = 1024
"""How many operations are remembered."""

_HELD_WORKS = 16  # of a stream
_CLOSED_GROUPS = 64  # that are remembered

_ring: list[Operation | None] = [None] * RING
_last: Operation | None = None
_running: dict[int, Operation] = {}
_numbers = itertools.count()
_new, _getframe = object.__new__, sys._getframe
_streams: list[StreamQueue] = []
_groups: dict[str, Group] = {}

# Files whose frames are not the user's: the caller is looked for above them.
_PACKAGES = ("mpicomm", "torch")
_MACHINERY = ("contextlib", "functools", "threading", "typing_extensions", "warnings")  # threads, and decorators
_PROGRAMS = ("examples", "bench")  # folders in them, of files that are
_call_sites: dict[int, types.CodeType] = {}
"""The instructions of the user's that call operations, by place in memory: to walk the stack costs half of `note`."""

_rank_pid = 0
"""The rank's process, in a child that it has forked."""


class _Thread(threading.local):
    """What is known of the current thread. It ends with the thread, whose number is then given to another."""

    calls_operations = False


_thread = _Thread()
_callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that have called operations
_NOWHERE = object()
_MOST_CALL_SITES = 4096
_USUAL_STEPS = 2  # from the first frame that may be the user's to the one that is: torch's function, and its wrapper
_inner_files: set[str] = set()
_users_files: set[str] = set()


class Group:
    """What is known here of a group whose operations are recorded."""

    def __init__(self, name: str, ranks: Sequence[int], timeout: float, *, is_world: bool) -> None:
        """Describe a group.

        Args:
            ranks: The members' ranks in the job, in the order of the group.
            timeout: Seconds that an operation may take.
        """
        self.name = name
        self.ranks = ranks
        self.timeout = timeout
        self.is_world = is_world
        self.broken = ""
        """What happened, if the group cannot be used any more, here or on another rank."""

        self.sequence = 0
        """How many collective operations this rank has called on the group."""

        self.running: Operation | None = None
        """The collective that runs since it was called; others that run or are waited for are in the table of all."""

        self.is_closed = False
        """Whether the group was destroyed here; what was called on it is still told to those who wait in it."""

        _groups.pop(name, None)
        _groups[name] = self
        _forget_closed_groups()


class Operation:
    """One call of an operation on this rank."""

    __slots__ = (
        "called",
        "code",
        "count",
        "dtype",
        "end",
        "group",
        "instruction",
        "is_message",
        "limit",
        "name",
        "number",
        "peer",
        "sequence",
        "start",
    )

    code: types.CodeType | None
    instruction: int
    group: Group
    is_message: bool
    sequence: int | None
    name: str
    dtype: Any
    count: int
    peer: int | None
    number: int
    called: float
    start: float | None
    end: float | None
    limit: float | None
    """Seconds after which the watchdog ends the job; None if whoever waits ends it himself."""

    def begin(self) -> None:
        """Note that the operation runs, or that somebody waits for it: from now on its deadline counts."""
        # Numbered in the order in which they run: callbacks that call operations come to be called at any moment.
        self.take_number()
        self.start = monotonic()
        _running[self.number] = self

    def take_number(self) -> None:
        """Take the next of the group's numbers, if this is a collective without one."""
        if self.sequence is None and not self.is_message:
            self.sequence = self.group.sequence = self.group.sequence + 1

    def finish(self) -> None:
        """Note that the operation has ended, well or not."""
        self.end = monotonic()
        if self.group.running is self:
            self.group.running = None
        else:
            _running.pop(self.number, None)

    def forgive(self, seconds: float) -> None:
        """Let the deadline pass so much later: this process stood still meanwhile."""
        if self.start is not None:
            self.start += seconds

    def pause(self) -> None:
        """Note that nobody waits for the operation any more, though it has not ended."""
        if self.group.running is self:
            self.group.running = None
        else:
            _running.pop(self.number, None)

    @property
    def needs(self) -> list[int]:
        """The ranks of the job without which the operation cannot end: the partner, or the whole group."""
        if self.is_message and self.peer is not None:
            return [self.group.ranks[self.peer]]
        return list(self.group.ranks)

    @property
    def where(self) -> str:
        """Where in the user's program it was called; where the main thread is now, for a call of C++."""
        if self.code is None:
            return line_of_main_thread() or "an unknown place"
        return line_of(self.code, self.instruction)

    def describe(self, now: float) -> dict[str, Any]:
        """Return what other ranks and files are told of the operation."""
        return {
            "name": self.name,
            "group": self.group.name,
            "members": "" if self.group.is_world else hang_report.ranges(self.group.ranks),
            "sequence": self.sequence,
            "is_message": self.is_message,
            "dtype": "" if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "count": self.count,
            "peer": None if self.peer is None else self.group.ranks[self.peer],
            "where": self.where,
            "called": round(now - self.called, 6),
            "seconds": None if self.start is None else round((self.end or now) - self.start, 6),
            "is_over": self.end is not None,
        }


def note(
    group: Group, name: str, dtype: Any, count: int, peer: int | None, is_message: bool, is_running: bool, depth: int
) -> Operation:
    """Note a call in the ring.

    Every operation pays for this, hence the plain function: a class that is called costs a tenth of a microsecond more.

    Args:
        peer: The root of a collective or the partner of a message, as a rank of the group; None if there is none.
        is_running: The operation begins at once.
        depth: How many frames lie between this one and the first that may be the user's.
    """
    global _last  # noqa: PLW0603  as the ring
    try:
        frame = _getframe(depth + 2)  # the user's, if the call went through a function of torch's and its wrapper
        code, instruction = frame.f_code, frame.f_lasti
    except ValueError:
        code, instruction = None, 0
    if _call_sites.get(id(code) + instruction, _NOWHERE) is not code:
        code, instruction = _find_caller(depth)
    if not _thread.calls_operations:
        _note_thread()
    operation = _new(Operation)
    operation.code = code
    operation.instruction = instruction
    operation.group = group
    operation.is_message = is_message
    operation.name = name
    operation.dtype = dtype
    operation.count = count
    operation.peer = peer
    operation.end = None
    operation.limit = group.timeout
    operation.number = number = next(_numbers)
    operation.called = now = monotonic()
    if is_running and not is_message:
        operation.sequence = group.sequence = group.sequence + 1
        operation.start = now
        if group.running is None:
            group.running = operation
        else:
            _running[number] = operation
    else:
        operation.sequence = operation.start = None
        if is_running:
            operation.begin()
    _ring[number % RING] = _last = operation
    return operation


def _note_thread() -> None:
    _thread.calls_operations = True
    ident = get_ident()
    # threading.current_thread() would make up a thread for one that C++ has started.
    _callers.update(thread for thread in threading.enumerate() if thread.ident == ident)


def _find_caller(depth: int) -> tuple[types.CodeType | None, int]:
    """Return the code and the instruction of the user's that called, for a caller that called `note` at `depth`."""
    frame: types.FrameType | None = _getframe(depth + 1)
    steps = 0
    while frame is not None and _is_inner(frame.f_code.co_filename):
        frame = frame.f_back
        steps += 1
    if frame is None:  # called by C++ on a thread of its own
        return None, 0
    if steps == _USUAL_STEPS:
        # The next call from this very instruction comes the same way, and need not look again.
        if len(_call_sites) >= _MOST_CALL_SITES:
            _call_sites.clear()
        _call_sites[id(frame.f_code) + frame.f_lasti] = frame.f_code
    return frame.f_code, frame.f_lasti


class StreamQueue:
    """The operations that an inner backend runs one after the other, on a GPU's stream.

    Only the oldest open one runs, so the time in which others wait for the GPU does not count toward their timeouts.
    A few works among the open ones are kept and looked at, not all: a work may hold its tensors.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._open: collections.deque[Operation] = collections.deque()
        self._held: list[tuple[Operation, Any]] = []
        _streams.append(self)

    def note(self, name: str, dtype: Any, count: int, is_message: bool) -> Operation:
        """Note the call of an operation."""
        return note(self._group, name, dtype, count, None, is_message, is_running=False, depth=2)

    def started(self, operation: Operation, work: Any) -> None:
        """Note that the inner backend has queued an operation."""
        with self._lock:
            operation.take_number()
            self._open.append(operation)
            self._held.append((operation, work))
            if len(self._held) > _HELD_WORKS:
                self._held = [self._held[0], *self._held[1:-1:2], self._held[-1]]
            if len(self._open) > RING:
                self._open.popleft().finish()
            self._begin_oldest()

    def refresh(self) -> None:
        """Note which operations have ended; called on the watchdog's thread."""
        with self._lock:
            last_over = max((operation.number for operation, work in self._held if _is_over(work)), default=-1)
            self._held = [(operation, work) for operation, work in self._held if operation.number > last_over]
            while self._open and self._open[0].number <= last_over:
                self._open.popleft().finish()
            self._begin_oldest()

    def _begin_oldest(self) -> None:
        if self._open and self._open[0].start is None:
            self._open[0].begin()

    def close(self) -> None:
        """Let go of everything, at the end of the group."""
        with self._lock:
            for operation in self._open:
                operation.finish()
            self._open.clear()
            self._held.clear()
        if self in _streams:
            _streams.remove(self)


def _is_over(work: Any) -> bool:
    try:
        return work.is_completed()
    except Exception:  # noqa: BLE001  an operation that failed has ended; who waits for it hears why
        return True


def refresh_streams() -> None:
    """Note which operations on streams have ended; on the watchdog's thread."""
    for stream in _streams.copy():  # others may come and go meanwhile
        stream.refresh()


def recorded() -> list[Operation]:
    """Return the operations in the ring, oldest first."""
    return sorted((each for each in list(_ring) if each is not None), key=lambda each: each.number)


def running() -> list[Operation]:
    """Return the operations that run or are waited for."""
    of_groups = [group.running for group in list(_groups.values())]
    return [*(operation for operation in of_groups if operation is not None), *_running.values()]


def last() -> Operation | None:
    """Return the operation that was called last, if any was."""
    return _last


def sequences() -> dict[str, int]:
    """Return by group how many collectives were called on it."""
    return {group.name: group.sequence for group in list(_groups.values())}


def _files_of(modules: Sequence[str]) -> list[str]:
    """Return the files of those modules that are imported."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
    return [file for file in files if file]


def refuse_children() -> None:
    """Check that this process is the rank, and not a child that it forked.

    Raises:
        MpicommError: In a forked child, whose call would take the place of the rank's next one.
    """
    if _rank_pid:
        raise MpicommError(
            f"process {os.getpid()} is a child that process {_rank_pid}, a rank of the job, has forked (as DataLoader "
            f"workers and multiprocessing pools are); it cannot call operations or wait for them.\n"
            f"Call them in the rank itself: let __getitem__, collate_fn or the pool's function return the data."
        )


def _mark_child() -> None:
    """Let no group be used in a forked child: all ways to run an operation look at this."""
    global _rank_pid  # noqa: PLW0603  a child stays one
    _rank_pid = os.getppid() if _groups else 0
    for group in _groups.values():
        group.broken = group.broken or "this process is a child of the rank"


os.register_at_fork(after_in_child=_mark_child)


def break_group(name: str, cause: str) -> None:
    """Note that a group cannot be used any more; the first cause stays."""
    group = _groups.get(name)
    if group is not None and not group.broken:
        group.broken = cause


def has_open_collectives() -> bool:
    """Tell whether a collective that was called has not ended, be it running or queued."""
    return any(each is not None and each.end is None and not each.is_message for each in list(_ring))


def _forget_closed_groups() -> None:
    closed = [name for name, group in _groups.items() if group.is_closed]
    for name in closed[:-_CLOSED_GROUPS]:
        del _groups[name]


def is_used_by(thread: threading.Thread) -> bool:
    """Tell whether a thread has called operations."""
    return thread in _callers


def is_used_by_a_thread() -> bool:
    """Tell whether a thread other than the main one, still alive, has called operations."""
    return any(is_used_by(thread) for thread in threading.enumerate() if thread is not threading.main_thread())


def line_of(code: types.CodeType, instruction: int) -> str:
    """Return where an instruction is, as `train.py:88 (train_step)`."""
    line = next(
        (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None),
        code.co_firstlineno,
    )
    name = Path(code.co_filename).name
    return f"{name}:{line}" if code.co_name == "<module>" else f"{name}:{line} ({code.co_name})"


def line_of_main_thread() -> str:
    """Return where the main thread is in the user's program; empty if it has ended."""
    thread = threading.main_thread()
    return _line_of_user(sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None)


def line_of_caller() -> str:
    """Return where the calling thread is in the user's program; empty if it is not from there."""
    return _line_of_user(_getframe(1))


def _line_of_user(frame: types.FrameType | None) -> str:
    while frame is not None and _is_inner(frame.f_code.co_filename):
        frame = frame.f_back
    return line_of(frame.f_code, frame.f_lasti) if frame else ""


def _is_inner(file: str) -> bool:
    """Tell whether a file is torch's, mpicomm's or Python's own machinery, but no program of ours; remember it."""
    if file in _inner_files or file in _users_files:
        return file in _inner_files
    folders = [str(Path(package).parent) + os.sep for package in _files_of(_PACKAGES)]
    programs = tuple(f"{folder}{program}{os.sep}" for folder in folders for program in _PROGRAMS)
    is_inner = file.startswith(("<frozen", *_files_of(_MACHINERY), *folders)) and not file.startswith(programs)
    (_inner_files if is_inner else _users_files).add(file)
    return is_inner
