"""The files of running jobs on this host, by which `mpicomm top` finds a job: a Unix socket, its token, a description.

They lie in a directory that only this user can open. A socket at which nobody listens is that of a job that ended
without removing its files, for example because of SIGKILL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from mpicomm.watchdog import local_processes

_BACKLOG = 128  # observers that wait to be accepted; there are few
_TOKEN_BYTES = 16  # too many to guess


@dataclasses.dataclass(frozen=True)
class JobFile:
    """A job, as its file describes it."""

    name: str
    size: int
    """The number of ranks."""

    program: str
    started: float
    """Seconds since the epoch."""

    pid: int
    """The process that listens: rank 0 or `mpicomm run`."""

    start_time: str
    """The start time of that process (`local_processes.start_time_of`)."""

    token: str
    """The secret with which an observer and that process authenticate each other, in hexadecimal digits."""

    @property
    def state(self) -> str:
        """The state of that process, for a message that it does not answer; empty if it is unknown."""
        is_same = bool(self.start_time) and local_processes.start_time_of(self.pid) == self.start_time
        return local_processes.state_of(self.pid) if is_same else ""


@dataclasses.dataclass(frozen=True)
class ListedJob:
    """A job file that has been found."""

    path: Path
    job: JobFile
    is_running: bool
    """Whether a process listens at its socket."""

    def connect(self, seconds: float) -> socket.socket:
        """Connect to the process that listens.

        Raises:
            OSError: If it does not listen any more.
        """
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(seconds)
            sock.connect(str(_socket_of(self.path)))
        except BaseException:
            sock.close()
            raise
        return sock

    def remove(self) -> None:
        """Remove the files of the job."""
        _remove(self.path)


def folders() -> list[Path]:
    """Return the directories in which the files may lie, the preferred one first.

    The second one is removed when the user logs out, while the job may continue.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return [Path(f"/tmp/mpicomm-{os.getuid()}"), Path(runtime, "mpicomm")]


def new(name: str, size: int, program: str, started: float) -> JobFile:
    """Return the description of a job in whose process this function is called, with a new token."""
    process = local_processes.this_process()
    return JobFile(name, size, program, started, process.pid, process.start_time, secrets.token_hex(_TOKEN_BYTES))


def publish(job: JobFile) -> tuple[Path, socket.socket]:
    """Listen for observers, and write the file.

    Returns:
        The path of the file, and the socket.

    Raises:
        OSError: If no directory can be used.
    """
    problems: list[OSError] = []
    for folder in folders():
        try:
            _make_private(folder)
            _remove_stale(folder)
            return _publish_in(folder, job)
        except OSError as error:
            problems.append(error)
    raise problems[0]


def withdraw(path: Path, job: JobFile) -> None:
    """Remove the files of a job, unless another process has replaced them: a job may continue with another rank 0."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        if _read(path).token == job.token:
            _remove(path)


def listed() -> list[ListedJob]:
    """Return the jobs of this user on this host, in the order of their start."""
    jobs = [listed for folder in folders() for listed in _listed_in(folder)]
    return sorted(jobs, key=lambda listed: (listed.job.started, listed.job.name))


def _publish_in(folder: Path, job: JobFile) -> tuple[Path, socket.socket]:
    path = folder / f"{job.name}.json"
    new_socket, new_file = folder / f".{job.pid}.sock", folder / f".{job.pid}.json"
    listener = socket.socket(socket.AF_UNIX)
    try:
        # The names are given last: a socket that does not listen yet would look like that of an ended job.
        new_socket.unlink(missing_ok=True)
        listener.bind(str(new_socket))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        new_file.unlink(missing_ok=True)
        with os.fdopen(os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(dataclasses.asdict(job), file)
        new_socket.rename(_socket_of(path))
        new_file.rename(path)
    except BaseException:
        listener.close()
        raise
    return path, listener


def _listed_in(folder: Path) -> Iterator[ListedJob]:
    if not _is_private(folder):
        return
    for path in sorted(folder.glob("[!.]*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):  # removed meanwhile, or of another version
            yield ListedJob(path, _read(path), _is_listening(_socket_of(path)))


def _remove_stale(folder: Path) -> None:
    for listed in _listed_in(folder):
        if not listed.is_running:
            listed.remove()


def _make_private(folder: Path) -> None:
    """Create a directory that only this user can open.

    Raises:
        OSError: If it cannot be created, or it is not such a directory.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not a directory that only user {os.getuid()} can open")


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _is_listening(path: Path) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
        return True


def _read(path: Path) -> JobFile:
    """Return the job that a file describes.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not JSON.
        TypeError: If it has other fields.
    """
    return JobFile(**json.loads(path.read_text()))


def _socket_of(path: Path) -> Path:
    return path.with_suffix(".sock")


def _remove(path: Path) -> None:
    for file in (path, _socket_of(path)):
        file.unlink(missing_ok=True)
