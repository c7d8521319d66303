"""The hosts of a job on Kubernetes: reads the operator's host file, and waits until the names of the hosts resolve."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm.cli.console import print_message
from mpicomm.errors import LaunchError
from mpicomm.launch import mpi_operator
from mpicomm.launch.mpi_library import Library
from mpicomm.launch.request import Request

_WAIT_SECONDS = 120.0  # a pod has a name in DNS when it has an address, which can be after the launcher starts
_PAUSE_SECONDS = 1.0


def apply(request: Request, library: Library, environ: Mapping[str, str]) -> tuple[Request, Mapping[str, str]]:
    """Return the request with the hosts of the operator's host file, and the environment of its launcher.

    Without a host file both are returned unchanged.

    Raises:
        LaunchError: If the file cannot be read, a host would have no rank, or a name does not resolve in time.
    """
    if (found := mpi_operator.host_file(environ)) is None:
        return request, environ
    variable, path = found
    if not request.hosts:
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise LaunchError(
                f"cannot read the host file of {variable}: {error}\nPass --hosts, or unset {variable}"
            ) from error
        request = dataclasses.replace(request, hosts=mpi_operator.parse(text, path, request.ranks))
        _wait_for_names([host.name for host in request.hosts])
    return dataclasses.replace(request, forwards_all=True), mpi_operator.for_launcher(environ, library)


def _wait_for_names(names: Sequence[str]) -> None:
    deadline, shown = time.monotonic() + _WAIT_SECONDS, False
    while missing := [name for name in names if not _resolves(name)]:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{len(missing)} of {len(names)} hosts had no address after {_WAIT_SECONDS:.0f} s: "
                f"{', '.join(missing)}\n"
                f"Check that their pods run: kubectl get pods -o wide"
            )
        if not shown:
            print_message("run", f"waiting for the addresses of {len(missing)} hosts: {', '.join(missing)}")
            shown = True
        time.sleep(_PAUSE_SECONDS)


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
