"""The flight recorder: the last operations of this rank, in a ring buffer that is always on.

An operation stores its call site in the user's program as a code object and an instruction offset. To find the line
number costs microseconds in a long function, so it is computed only when a report needs it.
"""

from __future__ import annotations

import collections
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import get_ident
from time import monotonic
from typing import Any

from mpicomm.errors import MpicommError
from mpicomm.native import extension
from mpicomm.recorder import rank_text
from mpicomm.recorder.status import OperationInfo

# -- constants ---------------------------------------------------------------------------------------------------------

RING = 1024
"""The capacity of the ring buffer, in operations."""

_RATE_SECONDS = 5.0  # the time over which the rate of bytes is computed
_SHORTEST_RATE_SECONDS = 1e-6  # it must not be 0
_CLOSED_GROUPS = 64  # the most destroyed groups that are kept

# Frames in these files are not the user's: the call site is the first frame above them.
_PACKAGES = ("mpicomm", "torch")
_MACHINERY = ("contextlib", "functools", "threading", "typing_extensions", "warnings")  # start threads or wrap calls
_PROGRAMS = ("examples", "bench")  # folders in these packages whose files count as the user's
_MOST_CALL_SITES = 4096  # of a program; code that is compiled at run time must not fill the memory
_USUAL_DEPTH = 7  # three methods of this package, one of the process group, torch's function, its wrapper, the user's
_LARGEST_DEPTH = 10  # with a deprecated function of torch and its wrapper
_INNER_FRAMES = _USUAL_DEPTH - 3  # those that a plain call of the extension module does not have
_NOWHERE = object()
_new, _getframe = object.__new__, sys._getframe

# -- the state of the recorder in this process -------------------------------------------------------------------------

_ring: list[Operation | None] = [None] * RING
_latest: list[Operation | None] = [None]
_running: dict[int, Operation] = {}
"""By number, the operations that run or for which a call waits, except `Group.running`."""

_numbers = itertools.count()
_groups: dict[str, Group] = {}
_call_sites: dict[int, types.CodeType] = {}
"""Code objects of known call sites: walking the stack costs half of `note`.

The key is the id() of the code object, plus the instruction offset, plus the hash of the operation's name.
"""

_depths: tuple[dict[str, int], dict[str, int]] = ({}, {})
"""By name, the number of frames between `note` and the last call site: for queued operations, and for others."""

_inner_files: set[str] = set()
_users_files: set[str] = set()
_rank_pid = 0
"""In a forked child, the pid of the rank; 0 in the rank itself."""


class _Thread(threading.local):
    """State of the current thread. It is not keyed by the thread's ident, which another thread may get later."""

    calls_operations = False


_thread = _Thread()
_callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that have called operations


_native = extension.module()
"""The extension module, which records plain calls without Python code; None if it was not built."""

_GroupRecord: type = object if _native is None else _native.GroupRecord
_CallRecord: type = object if _native is None else _native.CallRecord


OTHER_GROUP = "Use the default group, or create a new one with torch.distributed.new_group()."
"""The remedy of groups that have ended while the job continues."""


class Group(_GroupRecord):
    """The state of a process group on this rank, for recording its operations."""

    def __init__(self, name: str, ranks: Sequence[int], timeout: float, *, is_world: bool) -> None:
        """Register a group.

        Args:
            ranks: The global ranks of the members, in the order of the group.
            timeout: Timeout of an operation in seconds.
        """
        self.name = name
        self.ranks = ranks
        self.timeout = timeout
        self.is_world = is_world
        self.broken = ""
        """The error, on this or another rank, after which the group cannot be used any more; empty before."""

        self.remedy = ""
        """If it is broken, the next step, which errors name; empty if only the job can end."""

        self.sequence = 0
        """The number of collective operations that this rank has called on the group."""

        self.message_numbers: dict[tuple[str, int | None, int], Iterator[int]]
        self.message_numbers = collections.defaultdict(lambda: itertools.count(1))
        """The next number of a message by operation, peer and tag. MPI keeps their order, so equal numbers match."""

        self.running: Operation | None = None
        """The collective that has been running since its call; all other running operations are in `_running`."""

        self.is_closed = False
        """Whether this rank has destroyed the group. Its sequence is still reported to ranks that wait in the group."""

        _groups.pop(name, None)
        _groups[name] = self
        _forget_closed_groups()


_FIELDS = (
    "code", "instruction", "group", "is_message", "sequence", "name", "dtype", "count", "peer",
    "number", "called_at", "start", "end", "limit_or_options", "usual_limit", "tag", "message",
)  # fmt: skip


class Operation(_CallRecord):
    """One call of an operation on this rank; `note` and the extension module set the fields."""

    __slots__ = _FIELDS if _native is None else ()

    code: types.CodeType | None
    """The code of the call site; None for a call from C++."""

    instruction: int
    """The offset of the call in it, `f_lasti`."""

    group: Group
    is_message: bool
    """Whether it is a message between two ranks, not a collective."""

    sequence: int | None
    """The number of a collective in its group; None until it runs, and for messages."""

    name: str
    dtype: Any
    count: int
    """The number of elements of its input on this rank."""

    peer: int | None
    """The root of a collective or the peer of a message, as a rank of the group; None for other operations."""

    number: int
    """The number of the call on this rank."""

    called_at: float
    """When it was called, as `start` and `end` on the clock of `time.monotonic`."""

    start: float | None
    """When it began to run, or a call to wait for it; None before."""

    end: float | None
    """When it completed or failed; None before."""

    limit_or_options: Any
    """The limit, or torch's options of the call, which have its timeout: it takes time to read."""

    usual_limit: float
    """The timeout of the group at the call, if `limit_or_options` are options."""

    tag: int | None
    message: int | None
    """The number of a message with this peer and tag; None while the peer is unknown, and for other operations."""

    @property
    def limit(self) -> float | None:
        """Seconds after which the watchdog aborts the job; None if the waiting call raises TimeoutError instead."""
        limit = self.limit_or_options
        if limit is None or isinstance(limit, (int, float)):
            return limit
        seconds = limit.timeout.total_seconds()
        return seconds if seconds > 0 else self.usual_limit

    @limit.setter
    def limit(self, seconds: float | None) -> None:
        self.limit_or_options = seconds

    def begin(self) -> None:
        """Record that the operation runs, or that a call waits for it: this starts its deadline."""
        # Numbered in the order in which they run: callbacks may call operations at any time.
        self.take_number()
        self.start = monotonic()
        _running[self.number] = self

    def take_number(self) -> None:
        """Assign the next sequence number of the group, if this is a collective without one."""
        if self.sequence is None and not self.is_message:
            self.sequence = self.group.sequence = self.group.sequence + 1

    def number_message(self, tag: int) -> None:
        """Record the tag of a message, and number it; its peer must be known."""
        self.tag = tag
        self.message = next(self.group.message_numbers[self.name, self.peer, tag])

    def finish(self) -> None:
        """Record that the operation has completed or failed."""
        self.end = monotonic()
        if self.group.running is self:
            self.group.running = None
        else:
            _running.pop(self.number, None)

    def exempt_from_watchdog(self) -> None:
        """Let the watchdog not end the job for this operation: its call raises an error at its timeout."""
        self.limit = None

    def extend_deadline(self, seconds: float) -> None:
        """Extend the deadline by the seconds in which this process was suspended."""
        if self.start is not None:
            self.start += seconds

    def pause(self) -> None:
        """Record that no call waits for the operation any more, although it has not completed."""
        if self.group.running is self:
            self.group.running = None
        else:
            _running.pop(self.number, None)

    @property
    def needs(self) -> list[int]:
        """The global ranks that the operation needs to complete: the peer, or the whole group."""
        if self.is_message and self.peer is not None:
            return [self.group.ranks[self.peer]]
        return list(self.group.ranks)

    @property
    def where(self) -> str:
        """The call site in the user's program; for a call from C++, where the main thread is now."""
        if self.code is None:
            return line_of_main_thread() or "an unknown place"
        return line_of(self.code, self.instruction)

    @property
    def nbytes(self) -> int | None:
        """The recorded elements in bytes; None without a dtype."""
        return None if self.dtype is None else self.count * self.dtype.itemsize

    def describe(self, now: float) -> OperationInfo:
        """Return the fields of the operation for other ranks and for dump files."""
        return OperationInfo(
            number=self.number,
            name=self.name,
            group=self.group.name,
            members="" if self.group.is_world else rank_text.ranges(self.group.ranks),
            sequence=self.sequence,
            is_message=self.is_message,
            dtype="" if self.dtype is None else str(self.dtype).removeprefix("torch."),
            count=self.count,
            peer=None if self.peer is None else self.group.ranks[self.peer],
            where=self.where,
            called=round(now - self.called_at, 6),
            seconds=None if self.start is None else round((self.end or now) - self.start, 6),
            is_over=self.end is not None,
        )


def note(
    group: Group,
    name: str,
    dtype: Any,
    count: int,
    peer: int | None,
    is_message: bool,
    is_running: bool,
    inner_frames: int = 1,
) -> Operation:
    """Record a call in the ring buffer.

    This is on the path of every operation, hence a plain function: calling a class costs 0.1 microseconds more.

    Args:
        peer: The root of a collective or the peer of a message, as a rank of the group; None for other operations.
        is_running: Whether the operation starts at once.
        inner_frames: The number of frames that are not the user's, whatever their files; at least this one.
    """
    # 1. find the call site
    try:
        frame = _getframe(_depths[is_running].get(name, _USUAL_DEPTH))
        code, instruction = frame.f_code, frame.f_lasti
    except ValueError:
        code, instruction = None, 0
    if _call_sites.get(id(code) + instruction + hash(name), _NOWHERE) is not code:
        code, instruction = _find_caller(name, is_running, inner_frames)
    if not _thread.calls_operations:
        _note_thread()
    # 2. fill in the operation
    operation = _new(Operation)
    operation.code = code
    operation.instruction = instruction
    operation.group = group
    operation.is_message = is_message
    operation.name = name
    operation.dtype = dtype
    operation.count = count
    operation.peer = peer
    operation.end = operation.tag = operation.message = None
    operation.limit_or_options = group.timeout
    operation.number = number = next(_numbers)
    operation.called_at = now = monotonic()
    # 3. start it, and store it in the ring buffer
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
    _ring[number % RING] = _latest[0] = operation
    return operation


def _note_thread() -> None:
    _thread.calls_operations = True
    ident = get_ident()
    # threading.current_thread() would create a dummy Thread object for a thread that C++ has started.
    _callers.update(thread for thread in threading.enumerate() if thread.ident == ident)


def _find_caller(name: str, is_running: bool, inner_frames: int) -> tuple[types.CodeType | None, int]:
    """Return code object and instruction offset of the call site in the user's program."""
    frame, depth = _search_caller(_getframe(inner_frames + 1), inner_frames)
    if frame is None:
        return None, 0
    # The next call of this operation from this instruction has the same frames, so `note` need not search again.
    if depth <= _LARGEST_DEPTH:
        if len(_call_sites) >= _MOST_CALL_SITES:
            _call_sites.clear()
        _depths[is_running][name] = depth
        _call_sites[id(frame.f_code) + frame.f_lasti + hash(name)] = frame.f_code
    return frame.f_code, frame.f_lasti


def _find_caller_of_method() -> tuple[types.CodeType | None, int, int | None]:
    """Return the call site of a plain call, for the extension module, and its distance if its next call has the same.

    The distance is the number of frames below it.
    """
    frame, depth = _search_caller(_getframe(1), 0)
    if frame is None:
        return None, 0, None
    return frame.f_code, frame.f_lasti, depth if depth <= _LARGEST_DEPTH - _INNER_FRAMES else None


def _search_caller(frame: types.FrameType | None, depth: int) -> tuple[types.FrameType | None, int]:
    """Return the first frame of the user's program, and its distance; None if C++ has called on a thread without any.

    The distance does not tell that of the next call if it is large: calls from deep inside torch, such as those of
    FSDP, may have a user's module between.
    """
    # Without a call for most of the frames: there are about ten below an operation on a container.
    while frame is not None and ((file := frame.f_code.co_filename) in _inner_files or _is_inner(file)):
        frame = frame.f_back
        depth += 1
    return frame, depth


def recorded() -> list[Operation]:
    """Return the operations in the ring buffer, oldest first."""
    return sorted((each for each in list(_ring) if each is not None), key=lambda each: each.number)


def groups() -> list[Group]:
    """Return the groups of this rank, with those that were destroyed recently."""
    return list(_groups.values())


def running() -> list[Operation]:
    """Return the operations that run or for which a call waits."""
    of_groups = [group.running for group in list(_groups.values())]
    return [*(operation for operation in of_groups if operation is not None), *_running.values()]


def last() -> Operation | None:
    """Return the operation that was called last; None before the first call."""
    return _latest[0]


def bytes_per_second(now: float) -> float:
    """Return the rate of the bytes of this rank's operations that have completed in the last seconds.

    The bytes of an operation are those of its input on this rank. The rate is computed from the ring buffer, so that
    counting costs nothing per operation; if the buffer is full, it covers the time since its oldest operation.
    """
    operations = recorded()
    if not operations:
        return 0.0
    since = max(now - _RATE_SECONDS, operations[0].called_at)
    completed = [each for each in operations if each.end is not None and each.end > since]
    total = sum(each.nbytes or 0 for each in completed)
    return total / max(now - since, _SHORTEST_RATE_SECONDS)


def sequences() -> dict[str, int]:
    """Return the number of collectives called on each group, by group name."""
    return {group.name: group.sequence for group in list(_groups.values())}


def _files_of(modules: Sequence[str]) -> list[str]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
    return [file for file in files if file]


def refuse_children() -> None:
    """Check that this process is the rank, and not a child that it has forked.

    Raises:
        MpicommError: In a forked child, whose call would match the other ranks' calls in place of the rank's next one.
    """
    if _rank_pid:
        raise MpicommError(
            f"process {os.getpid()} was forked by process {_rank_pid}, a rank of the job (like DataLoader workers and "
            f"multiprocessing pools); a forked child cannot call operations or wait for them.\n"
            f"Call them in the rank itself: return the data from __getitem__, collate_fn or the pool's function."
        )


def _mark_child() -> None:
    """Mark all groups as broken in a forked child; every path that runs an operation checks this."""
    global _rank_pid  # noqa: PLW0603  set once, in a forked child
    _rank_pid = os.getppid() if _groups else 0
    for group in _groups.values():
        group.broken = group.broken or "this process was forked from the rank"


os.register_at_fork(after_in_child=_mark_child)


def break_group(name: str, cause: str, remedy: str = "") -> None:
    """Record that a group cannot be used any more; the first cause is kept, with its remedy."""
    group = _groups.get(name)
    if group is not None and not group.broken:
        group.broken, group.remedy = cause, remedy


def break_all(cause: str, remedy: str = "") -> None:
    """Record that no group can be used any more; causes that groups have already are kept."""
    for name in list(_groups):
        break_group(name, cause, remedy)


def end_all(cause: str) -> None:
    """Forget all groups and their operations, since their world has ended; they cannot be used any more."""
    for group in list(_groups.values()):
        group.broken, group.remedy, group.running = cause, OTHER_GROUP, None
    _groups.clear()
    _running.clear()


def has_open_collectives() -> bool:
    """Return whether a collective is running or queued."""
    return any(each is not None and each.end is None and not each.is_message for each in list(_ring))


def _forget_closed_groups() -> None:
    closed = [name for name, group in _groups.items() if group.is_closed]
    for name in closed[:-_CLOSED_GROUPS]:
        del _groups[name]


def is_used_by(thread: threading.Thread) -> bool:
    """Return whether a thread has called operations."""
    return thread in _callers


def is_used_by_a_thread() -> bool:
    """Return whether a live thread other than the main thread has called operations."""
    return any(is_used_by(thread) for thread in threading.enumerate() if thread is not threading.main_thread())


def line_of(code: types.CodeType, instruction: int) -> str:
    """Return the source line of an instruction, as `train.py:88 (train_step)`."""
    line = number_of_line(code, instruction)
    name = Path(code.co_filename).name
    return f"{name}:{line}" if code.co_name == "<module>" else f"{name}:{line} ({code.co_name})"


def number_of_line(code: types.CodeType, instruction: int) -> int:
    """Return the number of the source line of an instruction."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    return next(lines, code.co_firstlineno)


def line_of_main_thread() -> str:
    """Return the line of the user's program at which the main thread is; empty if the thread has ended."""
    thread = threading.main_thread()
    return _line_of_user(sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None)


def line_of_caller() -> str:
    """Return the line of the user's program at which the calling thread is; empty without a frame of that program."""
    return _line_of_user(_getframe(1))


def _line_of_user(frame: types.FrameType | None) -> str:
    frame, _ = _search_caller(frame, 0)
    return line_of(frame.f_code, frame.f_lasti) if frame else ""


def _is_inner(file: str) -> bool:
    """Return whether a file belongs to torch, mpicomm (except its programs) or the listed modules of Python; cached."""
    if file in _inner_files or file in _users_files:
        return file in _inner_files
    folders = [str(Path(package).parent) + os.sep for package in _files_of(_PACKAGES)]
    programs = tuple(f"{folder}{program}{os.sep}" for folder in folders for program in _PROGRAMS)
    is_inner = file.startswith(("<frozen", *_files_of(_MACHINERY), *folders)) and not file.startswith(programs)
    (_inner_files if is_inner else _users_files).add(file)
    return is_inner


if _native is not None:
    _native.configure_recorder(
        {
            "operation": Operation,
            "get_frame": _getframe,
            "find_caller": _find_caller_of_method,
            "note_thread": _note_thread,
            "numbers": _numbers,
            "ring": _ring,
            "latest": _latest,
            "running": _running,
        }
    )
