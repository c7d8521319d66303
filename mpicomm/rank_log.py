"""Log files of the ranks, rank_000.log and so on.

`copy_output` copies what a running program prints. `mpicomm run --log-dir` wraps each rank, so that its log also has
the output of the MPI library and of other processes: `python -m mpicomm.rank_log DIR all|0 [--append] COMMAND...`. A
wrapped rank whose output is not shown writes its file directly. If the output is shown, the process that the launcher
started copies it, since some launchers kill the remaining processes when that process exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from mpicomm.launch import detect
from mpicomm.launch.known_launchers import STOPS, WARNINGS

_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
_NOT_RUN = 127
_POLL_SECONDS = 0.2  # between checks for the program's exit, since its children may keep its output open


def path_of(directory: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's log."""
    return Path(directory) / f"rank_{rank:03d}.log"


# -- within the program ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def copy_output(path: Path) -> Iterator[None]:
    """Append what this process prints to stdout and stderr within the block to a file.

    A file that cannot be written is a warning.
    """
    log = _Log(path)
    stdout: Any = _Tee(sys.stdout, log)
    stderr: Any = _Tee(sys.stderr, log)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            yield
    finally:
        log.close()


class _Log:
    """A log that two streams share. If it cannot be written, it warns once, and the program continues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            self._warn(error)

    def write(self, text: str) -> None:
        if (file := self._file) is not None:
            try:
                file.write(text)
                file.flush()
            except (OSError, ValueError) as error:  # ValueError: another thread has closed it
                self.close()  # before the warning, which Python prints to one of the two streams
                self._warn(error)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError, ValueError):  # reported by `write`
                file.close()

    def _warn(self, error: Exception) -> None:
        message = f"output is not copied to {str(self._path)!r}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)


class _Tee:
    """A stream that also writes to a log."""

    def __init__(self, stream: TextIO, log: _Log) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# -- around the program ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run a rank's program with its output in a file; return its exit status if this process copies the output."""
    directory, shown, *command = arguments
    appends = command[0] == "--append"
    command = command[appends:]
    os.environ["TERM"] = "dumb"  # the log gets the same output: no colours and no progress bars
    rank = detect.guess_rank(os.environ)
    path = path_of(directory, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if appends else os.O_TRUNC), 0o666)
    except OSError as error:
        print(f"mpicomm run: rank {rank} cannot write its log: {error}", file=sys.stderr)
        return _NOT_RUN
    if shown == "all" or rank == 0:
        return _run_and_copy(command, log)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return become(command)


def become(command: Sequence[str]) -> int:
    """Replace this process by a rank's program; return the exit status if it cannot be run."""
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"mpicomm run: cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
    return _NOT_RUN


def _run_and_copy(command: list[str], log: int) -> int:
    pipes = {1: os.pipe(), 2: os.pipe()}
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
        for stream, (_, write) in pipes.items():
            os.dup2(write, stream)
        os._exit(become(command))
    for number in (*STOPS, *WARNINGS):  # launchers send them to the whole process group: the program gets them, too
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # do not use the rank's cores
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    for _, write in pipes.values():
        os.close(write)
    status = _copy({read: stream for stream, (read, _) in pipes.items()}, log, pid)
    if status < 0:
        _end_by(-status)
    return status


def _copy(streams: dict[int, int], log: int, pid: int) -> int:
    """Copy until the program has ended and all of its output is copied; return its status, negative for a signal."""
    ended: int | None = None
    with selectors.DefaultSelector() as selector:
        for read in streams:
            selector.register(read, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(_POLL_SECONDS if ended is None else 0)
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fd)
                    continue
                _write(log, data)
                _write(streams[key.fd], data)
            if not ready:
                if ended is not None:
                    break
                ended = _status_if_ended(pid)
    if ended is None:
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return ended


def _status_if_ended(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _write(file: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed terminal must not end a rank
        while data:
            data = data[os.write(file, data) :]


def _end_by(number: int) -> None:
    """End by the same signal as the program, without a second core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
