"""Prints which ranks have not called `bootstrap()`, while a rank waits in MPI_Init, which never releases the GIL.

A POSIX timer (timer_create with SIGEV_THREAD) calls the C library's system() on a thread of its own, which needs no GIL
and runs this file as a script in another interpreter. It costs about 0.2 ms until the timer expires, and before that
creates no process to clean up. The script has one argument, a JSON object with the fields of `Waiting`; it runs without
the package, so this module imports only the standard library.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicomm.launch.detect import Launch

_NOTICE_SECONDS = 30.0  # after which a waiting rank prints which ranks are missing
_SIGEV_THREAD = 2  # bits/siginfo-consts.h, on every architecture
_MARKER = "mpicomm-start-"  # and the pid: the name of the abstract Unix socket that a process keeps open while it waits
_ALWAYS_PRINT = 16  # ranks below this may print; above, only powers of two, so that large jobs print few lines
_MAX_LISTED = 8  # ranks or hosts that are listed one by one, each on a line of its own
_COMMAND = 120  # characters of a command line

_commands: list[ctypes.Array[ctypes.c_char]] = []  # kept alive: an expired timer may read its command at any later time


@dataclasses.dataclass(frozen=True)
class Waiting:
    """The information that a waiting rank passes to the script."""

    pid: int
    rank: int
    size: int | None
    """The number of ranks; None if the launcher does not set it."""

    local_size: int | None
    """The number of ranks on this host; None if the launcher does not set it."""

    variable: str
    """The environment variable in which the launcher passes the rank."""

    host: str
    phase: str
    seconds: float
    limit: float
    """Seconds after which the job is aborted."""

    script: str
    """The program: sys.argv[0]."""


# -- the timer ---------------------------------------------------------------------------------------------------------


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


def seconds_before_notice(hang_seconds: float, limit: float) -> float:
    """Return the seconds that a rank waits for others, at most `limit`, before it prints a notice."""
    return min(_NOTICE_SECONDS, hang_seconds, limit / 2)


@contextlib.contextmanager
def report_missing_after(seconds: float, launch: Launch, phase: str, limit: float) -> Iterator[None]:
    """Print which ranks are missing if the block takes longer than `seconds`; all ranks must execute the same block.

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
                marker.bind(f"\0{_MARKER}{waiting.pid}")
                _start_timer(stack, waiting)
        yield


def _waiting(launch: Launch, phase: str, seconds: float, limit: float) -> Waiting | None:
    """Return the arguments for the script; None without a launcher, or for a job of one process."""
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
    arguments = [sys.executable, "-I", "-S", __file__, json.dumps(dataclasses.asdict(waiting))]
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


# -- the script --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of a rank."""

    pid: int
    rank: int
    command: str
    is_waiting: bool


def report(waiting: Waiting, processes: Sequence[Process], hosts: str) -> str | None:
    """Return the text to print; None if another rank of this host prints it, or this rank no longer waits.

    Args:
        processes: The processes of this host's ranks; a rank may have several.
        hosts: The hosts of the job as the launcher lists them; empty without such a list.
    """
    waiting_ranks = {process.rank for process in processes if process.is_waiting}
    if waiting.rank != min(filter(_may_print, waiting_ranks), default=None):
        return None
    of = "" if waiting.size is None else f" of {waiting.size}"
    name = f"rank {waiting.rank}{of} on {waiting.host}"
    lines = [
        f"[mpicomm] {name} has waited {waiting.seconds:g} s in bootstrap() ({waiting.phase}) for other ranks.",
        *(f"  {line}" for line in _ranks_of_host(waiting, processes, waiting_ranks)),
        *([f"  hosts of the job: {hosts}"] if hosts else []),
        *_remedy(waiting, waiting_ranks),
    ]
    return "\n".join(lines) + "\n"


def _may_print(rank: int) -> bool:
    return rank < _ALWAYS_PRINT or rank & (rank - 1) == 0


def _ranks_of_host(waiting: Waiting, processes: Sequence[Process], waiting_ranks: set[int]) -> list[str]:
    lines = [f"waiting on {waiting.host}: {_listed(waiting_ranks)}"]
    others: dict[int, Process] = {}
    for process in processes:
        if process.rank not in waiting_ranks:
            others.setdefault(process.rank, process)
    lines += [
        f"rank {rank} on {waiting.host} has not called bootstrap(): process {process.pid}, {process.command}"
        for rank, process in sorted(others.items())[:_MAX_LISTED]
    ]
    if len(others) > _MAX_LISTED:
        lines.append(f"and {len(others) - _MAX_LISTED} more ranks on {waiting.host} have not")
    seen = waiting_ranks | others.keys()
    if waiting.local_size is None or len(seen) > waiting.local_size:
        return lines
    missing = waiting.local_size - len(seen)
    if missing and waiting.local_size == waiting.size:
        not_started = _listed(set(range(waiting.size)) - seen)
        lines.append(f"{not_started}: no process on {waiting.host}, exited before bootstrap()")
    elif missing:
        lines.append(
            f"{missing} of the {waiting.local_size} ranks on {waiting.host}: no process, exited before bootstrap()"
        )
    elif not others and waiting.local_size == waiting.size:
        lines.append("every rank has called bootstrap(): MPI itself is slow or blocked")
    elif not others:
        lines.append(
            f"all {waiting.local_size} ranks on {waiting.host} are waiting: the absent ranks are on other hosts"
        )
    return lines


def _remedy(waiting: Waiting, waiting_ranks: set[int]) -> list[str]:
    limit = f"The job is aborted after {waiting.limit:g} s; bootstrap(timeout=...) changes this limit."
    if waiting.script in ("", "-") and waiting_ranks == {0}:  # Python reads its program from standard input
        return [
            limit,
            "This program comes from standard input, which mpirun passes to rank 0 only. Save it to a file and start",
            f"  mpirun -n {waiting.size or 'N'} python FILE",
        ]
    if len(waiting_ranks) == waiting.size:
        return [
            limit,
            "Check that MPI works without mpicomm, with the same launcher and hosts:",
            f"  mpirun -n {waiting.size} python -m mpi4py.bench helloworld",
        ]
    return [
        limit,
        "Check that every rank runs this program, and that no rank exits or blocks before mpicomm.bootstrap().",
    ]


def _listed(ranks: set[int]) -> str:
    first = ", ".join(map(str, sorted(ranks)[:_MAX_LISTED]))
    more = f" and {len(ranks) - _MAX_LISTED} more" if len(ranks) > _MAX_LISTED else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {first}{more}"


# -- information from /proc and the scheduler --------------------------------------------------------------------------


def processes_of_job(pid: int, variable: str) -> list[Process]:
    """Return the processes of the ranks that the launcher's daemon started on this host, parents first.

    The daemon is the nearest ancestor of `pid` whose environment lacks the launcher's variable.
    """
    parents = _parents()
    daemon = pid
    while (parent := parents.get(daemon)) and _rank_of(daemon, variable) is not None:
        daemon = parent
    children = collections.defaultdict(list)
    for child, parent in sorted(parents.items()):
        children[parent].append(child)
    markers = {line.rpartition(" ")[2] for line in _read("/proc/net/unix").splitlines()}
    processes, next_ones = [], list(children[daemon])
    while next_ones:
        child_pid = next_ones.pop(0)
        rank = _rank_of(child_pid, variable)
        if rank is not None:
            processes.append(Process(child_pid, rank, _command_of(child_pid), f"@{_MARKER}{child_pid}" in markers))
            next_ones += children[child_pid]
    return processes


def hosts_of_job(environ: Mapping[str, str]) -> str:
    """Return the hosts of the job as its scheduler lists them; empty without such a list."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "LSB_HOSTS"):
        if environ.get(name):
            return f"{environ[name]} ({name})"
    names = list(dict.fromkeys(_read(environ.get("PBS_NODEFILE", "")).split()))
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(names[:_MAX_LISTED])}{more} (PBS_NODEFILE)" if names else ""


def _parents() -> dict[int, int]:
    """Return the parent pid of every process, by pid; without `host_info`, since the timer imports no package."""
    stats = {int(path.name): _read(path / "stat") for path in Path("/proc").iterdir() if path.name.isdigit()}
    return {pid: int(stat.rpartition(") ")[2].split()[1]) for pid, stat in stats.items() if stat}


def _rank_of(pid: int, variable: str) -> int | None:
    """Return the rank in the environment of a process; None if it is not set, or another user owns the process."""
    for entry in _read(f"/proc/{pid}/environ").split("\0"):
        name, _, value = entry.partition("=")
        if name == variable and value.isdecimal():
            return int(value)
    return None


def _command_of(pid: int) -> str:
    command = " ".join(_read(f"/proc/{pid}/cmdline").replace("\0", " ").split()) or "ended"
    return command if len(command) <= _COMMAND else f"{command[:_COMMAND]} ..."


def _read(path: str | Path) -> str:
    """Return the text of a file; empty if it cannot be read, such as that of a process that has ended."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    state = Waiting(**json.loads(sys.argv[1]))
    if text := report(state, processes_of_job(state.pid, state.variable), hosts_of_job(os.environ)):
        os.write(2, text.encode())
