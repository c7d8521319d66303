"""The store at which `init_process_group("env://")` connects ranks that do not call `bootstrap()`.

`mpicomm run` only listens. At the first connection it starts a process with torch's TCPStore, which takes over the
socket. So `mpicomm run` needs no torch, and programs that call `bootstrap()` start no store.
"""

from __future__ import annotations

import datetime
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading

from mpicomm.cli import child_process
from mpicomm.cli.console import print_message
from mpicomm.launch.known_launchers import STOPS, WARNINGS

# Not with -m, which lets files of the working directory take the place of modules that torch imports.
_PROGRAM = (
    "import sys; sys.path = [path for path in sys.path if path]; "
    "from mpicomm.cli import env_store; env_store.serve(int(sys.argv[1]))"
)
_TIMEOUT = datetime.timedelta(days=365)  # of the server's own operations, of which there are none


class EnvStore:
    """Listens, and starts the store at the first connection."""

    def __init__(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        """Create the store.

        Args:
            selector: Its caller calls the data of each key with the mask of its event.
            listener: A listening socket.
        """
        self._selector = selector
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None
        self._has_reported = False
        selector.register(listener, selectors.EVENT_READ, self._start)

    @property
    def port(self) -> int:
        """The port at which it listens; call it before the first connection."""
        return int(self._listener.getsockname()[1])

    @property
    def is_used(self) -> bool:
        """Whether a rank has connected."""
        return self._process is not None

    def close(self) -> None:
        """End the store."""
        if self._process is None:
            self._selector.unregister(self._listener)
            self._listener.close()
            return
        self._process.kill()
        self._process.wait()

    def _start(self, _mask: int) -> None:
        self._selector.unregister(self._listener)
        with self._listener:
            number = self._listener.fileno()
            command = [sys.executable, "-c", _PROGRAM, str(number)]
            self._process = subprocess.Popen(
                command,
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=functools.partial(_prepare, os.getpid()),  # noqa: PLW1509  other threads only read
            )

    def check(self) -> None:
        """Print a message if the store has ended by itself; call it regularly."""
        if self._process is not None and not self._has_reported and (status := self._process.poll()) is not None:
            self._has_reported = True
            print_message(
                "run",
                f"the process with the store of init_process_group() has ended with status {status}; its error is "
                f"above.\nRanks that connect to it will fail. It needs a torch that this Python can import.",
            )


def _prepare(parent: int) -> None:
    """Let this process end with its parent alone; signals to the ranks, or to their session, are not for it."""
    for number in (*STOPS, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)
    child_process.end_with(parent, signal.SIGKILL)


def serve(number: int) -> None:
    """Serve at a listening socket until this process is ended."""
    listener = socket.socket(fileno=number)
    port = listener.getsockname()[1]
    import torch.distributed as dist

    store = dist.TCPStore(
        "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    threading.Event().wait()
    del store
