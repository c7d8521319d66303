"""The store at which `init_process_group("env://")` connects ranks that do not call `bootstrap()`.

`mpicomm run` only listens. At the first connection it starts a process with torch's TCPStore, which takes over the
socket: `python -m mpicomm.cli.env_store FD`. So `mpicomm run` needs no torch, and programs that call `bootstrap()`
start no store.
"""

from __future__ import annotations

import ctypes
import datetime
import selectors
import signal
import socket
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TIMEOUT = datetime.timedelta(days=365)  # of the server's own operations, of which there are none
_END_SECONDS = 5.0


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
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self, _mask: int) -> None:
        self._selector.unregister(self._listener)
        with self._listener:
            number = self._listener.fileno()
            command = [sys.executable, "-m", "mpicomm.cli.env_store", str(number)]
            self._process = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)


def main(number: int) -> int:
    """Serve at a listening socket until this process is ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for ignored in (signal.SIGINT, signal.SIGHUP):  # for `mpicomm run`, which ends this process
        signal.signal(ignored, signal.SIG_IGN)
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
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
