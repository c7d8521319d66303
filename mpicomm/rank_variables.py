"""Sets the variables of torchrun's ranks, then runs a rank's program: `python -m mpicomm.rank_variables COMMAND...`.

Open MPI gives each rank a pseudo-terminal as standard output, also if `mpicomm run` writes to a file or a pipe. Then
the rank gets a pipe instead, so that programs print neither colours nor progress bars into the file.

`mpicomm run` wraps the ranks so. Programs that do not call `bootstrap()` take their rank from these variables, often
when they are imported, and without them many take themselves for the only process. `init_process_group("env://")`
connects the ranks by a store that `mpicomm run` opens at the first connection (`cli/env_store.py`). `--backend NAME`
before the command sets the variable of `mpicomm.unconverted`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from mpicomm import rank_log
from mpicomm.errors import LaunchError
from mpicomm.launch import detect
from mpicomm.launch.known_launchers import COMPARED, STOPS, TORCHRUN, WARNINGS
from mpicomm.settings import PARENT_VARIABLE, REPLACED_BACKEND, STORE_OF_RANK
from mpicomm.watchdog.parent_link import Parent

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # whether `import torch` loads extensions, such as mpicomm.unconverted
_CONNECT_SECONDS = 2.0  # for an address of `mpicomm run`; one that cannot be reached may not answer at all


def main(arguments: list[str]) -> int:
    """Set the variables, and replace this process by the program; return the exit status if that fails."""
    if arguments[:1] == ["--backend"]:
        os.environ.update({REPLACED_BACKEND: arguments[1], _AUTOLOAD: "1"})
        arguments = arguments[2:]
    parent = _parent(os.environ)
    os.environ.update(of_rank(os.environ))
    if parent is not None and not parent.has_terminal and os.isatty(1):
        _replace_terminal()
    return rank_log.become(arguments)


def _replace_terminal() -> None:
    """Make the standard output a pipe, which a process without a parent copies to the terminal.

    The rank keeps its process. The copying process has a session of its own, so that a signal to the rank's group does
    not end it before it has copied everything.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.setsid()
            for number in (*STOPS, *WARNINGS):
                signal.signal(number, signal.SIG_IGN)
            os.dup2(read, 0)
            for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if file > 1:
                    with contextlib.suppress(OSError):  # that of the listing itself
                        os.close(file)
            with contextlib.suppress(OSError):  # the launcher has ended
                while data := os.read(0, 1 << 16):
                    while data:
                        data = data[os.write(1, data) :]
        os._exit(0)
    os.waitpid(child, 0)
    os.dup2(write, 1)
    os.close(read)
    os.close(write)


def of_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not set; none if the launcher does not pass the rank, or the number of ranks."""
    try:
        launch = detect.detect(environ)
    except LaunchError:  # bootstrap() reports it
        return {}
    parent = _parent(environ)
    size = launch.value("size") or (parent.ranks if parent else 0)
    if launch.value("rank") is None or not size:
        return {}
    facts = {**{fact: launch.value(fact) for fact in COMPARED}, "size": size}
    variables = {str(getattr(TORCHRUN, fact)): str(value) for fact, value in facts.items() if value is not None}
    return {name: value for name, value in {**variables, **_of_store(parent, environ)}.items() if name not in environ}


def _parent(environ: Mapping[str, str]) -> Parent | None:
    """Return where `mpicomm run` listens; None without it, or if it is of another version, as in a container."""
    with contextlib.suppress(ValueError):
        return Parent.parse(text) if (text := environ.get(PARENT_VARIABLE)) else None
    return None


def _of_store(parent: Parent | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the address of the store at `mpicomm run`; empty if the user has set the port of another one."""
    if parent is None or not parent.store_port or environ.get("MASTER_PORT"):
        return {}
    address = _reachable(parent)
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(parent.store_port),
        STORE_OF_RANK: f"{address} {parent.store_port}",
        # With 1, torch's TCPStore becomes a client on rank 0, too, after it has failed to bind the port.
        # mpicomm.unconverted replaces the value where torch loads extensions.
        "TORCHELASTIC_USE_AGENT_STORE": "1",
    }


def _reachable(parent: Parent) -> str:
    """Return the first address at which this host reaches `mpicomm run`; the last one if it reaches none."""
    for address in parent.addresses[:-1]:
        try:  # not at the port of the store, which starts at the first connection
            socket.create_connection((address, parent.port), _CONNECT_SECONDS).close()
        except OSError:
            continue
        return address
    return parent.addresses[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
