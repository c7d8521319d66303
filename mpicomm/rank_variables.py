"""Sets the variables of torchrun's ranks, then runs a rank's program: `python -m mpicomm.rank_variables COMMAND...`.

`mpicomm run` wraps the ranks so. Programs that do not call `bootstrap()` take their rank from these variables, often
when they are imported, and without them many take themselves for the only process. `init_process_group("env://")`
connects the ranks by a store that `mpicomm run` opens at the first connection (`cli/env_store.py`). `--backend NAME`
before the command sets the variable of `mpicomm.unconverted`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping

from mpicomm import rank_log
from mpicomm.errors import LaunchError
from mpicomm.launch import detect
from mpicomm.launch.known_launchers import COMPARED, TORCHRUN
from mpicomm.settings import PARENT_VARIABLE, REPLACED_BACKEND, STORE_OF_RANK
from mpicomm.watchdog.parent_link import Parent

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # whether `import torch` loads extensions, such as mpicomm.unconverted
_CONNECT_SECONDS = 2.0  # for an address of `mpicomm run`; one that cannot be reached may not answer at all


def main(arguments: list[str]) -> int:
    """Set the variables, and replace this process by the program; return the exit status if that fails."""
    if arguments[:1] == ["--backend"]:
        os.environ.update({REPLACED_BACKEND: arguments[1], _AUTOLOAD: "1"})
        arguments = arguments[2:]
    os.environ.update(of_rank(os.environ))
    if os.isatty(1):
        os.environ.update(without_colors(os.environ))
    return rank_log.become(arguments)


def without_colors(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make programs print no colours, if the output of `mpicomm run` is not a terminal.

    Open MPI gives each rank a pseudo-terminal all the same.
    """
    parent = _parent(environ)
    if parent is None or parent.has_terminal or environ.get("FORCE_COLOR"):
        return {}
    return {"TERM": "dumb", "NO_COLOR": "1", "TTY_COMPATIBLE": "0"}  # with the last, rich takes it for a file


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
