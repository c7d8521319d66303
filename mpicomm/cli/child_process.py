"""The launcher as a child process in its own session, and the processes below it on this host.

This process becomes the subreaper: processes whose launcher is killed become its children, so that none is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mpicomm import host_info

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GONE_SECONDS = 5.0  # for killed processes to end; one in an uninterruptible system call does not
_PAUSE_SECONDS = 0.02
_ATTEMPTS = 10  # to start with a pid whose directory does not exist
_FOREGROUND_SECONDS = 0.5  # between checks whether this process may read the terminal

_libc = ctypes.CDLL(None)


def start(command: Sequence[str], environ: Mapping[str, str], *, has_input: bool = True) -> subprocess.Popen[bytes]:
    """Start a command, which receives SIGTERM when this process is killed; call it on the main thread.

    In a session of its own it gets neither the terminal's Ctrl-C nor the signals that a scheduler sends to a session.
    It cannot read the terminal there: a thread passes the input on.

    Args:
        has_input: Whether it reads the standard input of this process; the next command does otherwise.

    Raises:
        OSError: If it cannot be executed.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with_parent = functools.partial(end_with, os.getpid(), signal.SIGTERM)

    def prepare() -> None:
        die_with_parent()
        if _has_leftover():
            raise FileExistsError

    def run(prepare: Callable[[], None]) -> subprocess.Popen[bytes]:
        # Other threads, if any, only read the terminal: the fork cannot inherit a lock that is held.
        return subprocess.Popen(
            command,
            env=environ,
            stdin=stdin if has_input else subprocess.DEVNULL,
            preexec_fn=prepare,  # noqa: PLW1509
            start_new_session=True,
        )

    stdin, pipe = os.pipe() if has_input and os.isatty(0) else (None, None)
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(subprocess.SubprocessError):  # `prepare` has failed: the next child has another pid
            process = run(prepare)
            break
    else:
        process = run(die_with_parent)
    if stdin is not None and pipe is not None:
        os.close(stdin)
        threading.Thread(target=_pass_on_terminal, args=(process, pipe), daemon=True).start()
    return process


def end_with(parent: int, number: int) -> None:
    """Let this process, a new child of `parent`, receive a signal when its parent ends; end it if that has happened."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _has_leftover() -> bool:
    """Return whether an mpirun of Open MPI with the pid of this process, which was killed, left its session directory.

    This process could not start as mpirun: "The PMIx server's listener thread failed to start". In a container, pids
    are used again soon.
    """
    return Path(tempfile.gettempdir(), f"ompi.{os.getpid()}").exists()


def signal_descendants(number: int) -> bool:
    """Send a signal to the launcher and all processes below it on this host; return whether there are any."""
    pids = _descendants()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            os.kill(pid, number)
    return bool(pids)


def kill_descendants() -> None:
    """Kill the launcher and all processes below it on this host, and wait until they have ended."""
    deadline = time.monotonic() + _GONE_SECONDS
    while signal_descendants(signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def _pass_on_terminal(process: subprocess.Popen[bytes], pipe: int) -> None:
    with contextlib.suppress(OSError):  # the launcher has closed its input, or has ended
        while process.poll() is None:
            if os.tcgetpgrp(0) != os.getpgrp():  # in the background, reading would stop this process
                time.sleep(_FOREGROUND_SECONDS)
            elif select.select([0], [], [], _FOREGROUND_SECONDS)[0] and os.tcgetpgrp(0) == os.getpgrp():
                data = os.read(0, 1 << 16)
                if not data:
                    break
                while data:
                    data = data[os.write(pipe, data) :]
    with contextlib.suppress(OSError):
        os.close(pipe)


def _descendants() -> list[int]:
    """Return the pids of the running processes below this one that are not in its session.

    The launcher has a session of its own. Children in this session are others', for example of a shell that has been
    replaced by this process: `exec mpicomm run ... > >(tee log)`.
    """
    children: dict[int, list[int]] = {}
    own_session = os.getsid(0)
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            _, (state, parent, _group, session, *_) = host_info.process_stat(directory)
            if state not in ("Z", "X") and int(session) != own_session:
                children.setdefault(int(parent), []).append(int(directory.name))
    descendants, unvisited = [], [os.getpid()]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        descendants += below
        unvisited += below
    return descendants
